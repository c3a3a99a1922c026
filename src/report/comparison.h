// What a comparison found, and its tables.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/config.h"
#include "core/json.h"
#include "eval/layers.h"
#include "eval/perplexity.h"

namespace tapetune {

// How often a number hidden at this depth of a prompt of this length was found.
struct RetrievalCell {
  std::int64_t context = 0;
  double depth = 0;  // 0: at the beginning, 1: at the end
  std::int64_t trials = 0, correct = 0;
  double accuracy = 0;
};

struct StepLoss {
  std::int64_t step = 0;
  double loss = 0;
};

struct Cost {
  std::int64_t trained_parameters = 0;
  double step_seconds = 0, tokens_per_s = 0, peak_mb = 0;
};

// The base model, or what a recipe made of it.
struct Entry {
  std::string name;
  std::string method;                                      // none: the base
  std::int64_t context = 0;                                // the longest that it is made for
  std::string settings;                                    // the recipe, every key of it
  std::vector<std::vector<ContextPerplexity>> perplexity;  // a text each, then a context each
  std::vector<StepLoss> losses, held_out_losses;
  Cost cost;
  std::vector<RetrievalCell> passkey;  // empty: not measured
  std::vector<LayerPicture> layers;
};

struct ComparedText {
  std::string name, path;
  std::int64_t first_token = 0, tokens = 0;
  bool held_out = false;  // of the training data
};

// A setting in which the recipes differ, with its value in each.
struct SettingRow {
  std::string key;
  std::vector<std::string> values;
};

struct Comparison {
  std::string version;
  std::string base;  // folder of the base model, or how it was drawn
  std::string base_hash;
  ModelConfig base_config;
  std::int64_t trained_context = 0, steps = 0, tokens_per_step = 0;
  std::uint64_t seed = 0;
  Protocol protocol = Protocol::sliding;
  std::vector<std::int64_t> contexts;
  std::vector<ComparedText> texts;
  std::vector<Entry> entries;  // the base first
  std::vector<SettingRow> differences;
  std::vector<std::int64_t> pictured;  // the tokens whose positions `layers` shows
};

// The smallest of a text and context over what was trained, and the base where it is smaller yet.
double best_perplexity(const Comparison& comparison, std::size_t text, std::size_t context);

Json results_json(const Comparison& comparison);
std::string results_csv(const Comparison& comparison);
std::string cost_csv(const Comparison& comparison);
std::string markdown(const Comparison& comparison);

// What the TAPE paper's table has for Llama-2 7B at 8192 tokens.
struct PaperRow {
  std::string_view text, method;
  double perplexity[4];
};
constexpr std::int64_t paper_contexts[4] = {1024, 2048, 4096, 8192};
// Empty where the base is another model or the trained context another.
std::vector<PaperRow> paper_rows(const Comparison& comparison);
// Its columns beside ours, of the longest context: what they are headed with, and an entry's cell in each.
std::vector<std::string> paper_headings(const Comparison& comparison);
std::vector<std::string> paper_cells(const Comparison& comparison, const Entry& entry);

// 4.024, 31.79, 512.3: four digits.
std::string shown_perplexity(double value);

}  // namespace tapetune
