// The files beside a merged model's weights: provenance, model card, and the tokenizer's settings.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>

#include "adapters/method.h"
#include "checkpoint/config.h"

namespace tapetune {

struct Origin {
  std::string version;  // of tapetune
  MethodOptions method;
  std::string base;          // folder; empty if trained from random weights
  std::string base_hash;     // Checkpoint::hash; empty in that case too
  std::string trained_hash;  // of the base model during training; empty: unknown
  std::int64_t base_context = 0;
  RopeConfig base_rope;
  std::optional<std::int64_t> step;     // of a checkpoint; none: the run's result
  std::int64_t steps = 0;               // of the whole run
  bool finished = false;                // the run has a result
  std::string recipe;                   // the run's recipe.yaml; empty for an adapter without a run
  std::int64_t batch = 0, context = 0;  // of its training
};

// tapetune_provenance.json.
std::string provenance(const Origin& origin, std::string_view what);

// README.md of a merged model, and of an adapter.
std::string model_card(const Origin& origin, const ModelConfig& config, const std::filesystem::path& folder);
std::string adapter_card(const Origin& origin, const ModelConfig& config, const std::filesystem::path& folder);

// Adds tokenizer_config.json of the folder `tokenizer` with its model_max_length raised to the model's context, where
// it is below (transformers would warn of longer texts and truncate them there), and a plain one where a tokenizer.json
// has none.
void complete_tokenizer(const ModelConfig& config, const std::filesystem::path& tokenizer,
                        std::map<std::string, std::string>& files);

}  // namespace tapetune
