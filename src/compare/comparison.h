// The results of a comparison: what was trained and measured, and where.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/config.h"
#include "eval/layers.h"
#include "eval/perplexity.h"

namespace tapetune {

// Passkey retrieval at one length of the prompt and one depth of the passkey in it.
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

// Of training.
struct Cost {
  std::int64_t trained_parameters = 0;
  double step_seconds = 0, tokens_per_s = 0, peak_mb = 0;
  std::vector<std::string> machines = {};  // on which the run trained; empty: an earlier version did not record them
};

// The base model, or the model that a recipe trained.
struct Entry {
  std::string name;
  std::string method;                                      // none: the base
  std::int64_t context = 0;                                // the longest that the model supports
  std::string settings;                                    // the recipe with all its keys, as YAML
  std::vector<std::vector<ContextPerplexity>> perplexity;  // [text][context]
  std::vector<StepLoss> losses, held_out_losses;
  Cost cost;
  std::vector<RetrievalCell> passkey;  // empty: not measured
  std::vector<LayerPicture> layers;
  bool positions_change = false;  // from layer to layer
};

struct ComparedText {
  std::string name, path;
  std::int64_t first_token = 0, tokens = 0;
  bool held_out = false;  // of the training data
};

// Recipes whose positions are scaled alike.
struct PositionGroup {
  std::string settings;
  std::vector<std::string> recipes;
};

// A setting in which the recipes differ, with its value in each, as YAML; "nothing" where a recipe has no such key.
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
  std::vector<PositionGroup> positions;
  std::string equal_positions;         // the command that gives all recipes the same positions; empty where they have
  std::vector<std::int64_t> pictured;  // the tokens whose positions `layers` shows
  std::string date, machine;           // where this report was made
  int threads = 0, ranks = 1;
};

// The index of the context that the headline is about: the one trained for, or else the longest.
std::size_t headline_context(const Comparison& comparison);
// The trained entry with the lowest perplexity on the first text.
const Entry& best_entry(const Comparison& comparison, std::size_t context);

// The lowest perplexity on a text at a context, over the base model and all trained ones.
double best_perplexity(const Comparison& comparison, std::size_t text, std::size_t context);

// "AMD EPYC 7763, 2 cores, 8 GB, 2 threads", and " on each of 4 ranks".
std::string machine_text(const std::string& machine, int threads, int ranks);

}  // namespace tapetune
