// The model that a command works on: a checkpoint with what the options put on it, a training run, or an adapter.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "adapters/build_model.h"
#include "checkpoint/finite.h"
#include "cli/options.h"
#include "distributed/world.h"
#include "hf/tokenizer.h"
#include "recipe/recipe.h"

namespace tapetune::cli {

struct LoadedModel {
  std::string name;  // the same for the same model, whatever the folder that one is in
  AdaptedModel adapted;
  std::filesystem::path tokenizer;  // empty: none is known
  std::optional<Recipe> recipe;     // of a run

  // For --resume: the name, and the arithmetic that results depend on.
  std::string identity() const;
  // Fails where the model comes without one.
  Tokenizer open_tokenizer() const;
};

// The options of a model, for commands that take a run as well.
void add_loaded_model(CLI::App& verb, ModelOptions& options, bool seeded = false);
LoadedModel open_loaded_model(const ModelOptions& options);
// Fails with the name of the first weight that has NaN or Inf, or as `error` says where none has.
[[noreturn]] void fail_naming_weight(const LoadedModel& loaded, const NotFinite& error);
// On the device that this rank computes on.
LoadedModel open_loaded_model(ModelOptions options, const World& world);

}  // namespace tapetune::cli
