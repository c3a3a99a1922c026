// What stands beside a result's weights: where it comes from, how to use it, and, for TAPE, the code that runs it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>

#include "adapters/options.h"
#include "checkpoint/config.h"

namespace tapetune {

struct Origin {
  std::string version;  // of tapetune
  MethodOptions method;
  std::string base;          // folder; empty where the weights were drawn
  std::string base_hash;     // Checkpoint::hash; empty likewise
  std::string trained_hash;  // of the base while training; empty: not known
  std::int64_t base_context = 0;
  std::optional<std::int64_t> step;  // of a run that was not finished
  std::string recipe;                // the run's recipe.yaml; empty where it was an adapter only
};

// tapetune_provenance.json.
std::string provenance(const Origin& origin, std::string_view what);

// README.md of a merged model, and of an adapter.
std::string model_card(const Origin& origin, const ModelConfig& config, const std::filesystem::path& folder);
std::string adapter_card(const Origin& origin, const ModelConfig& config, const std::filesystem::path& folder);

// The Python files by which transformers runs TAPE, and the keys of config.json that lead there.
void add_tape_files(const ModelConfig& config, const MethodOptions& method, std::map<std::string, std::string>& files);

}  // namespace tapetune
