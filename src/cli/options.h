// What several commands share on the command line.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "adapters/build_model.h"
#include "model/llama.h"

namespace CLI {
class App;
}

namespace tapetune::cli {

constexpr const char* device_help =
    "cpu, cuda or cuda:N (default: one GPU per rank if this build has CUDA and a GPU is found, else cpu)";

// The model of a command and how to compute with it.
struct ModelOptions {
  std::string folder;
  std::string dtype = "auto";
  std::string device = "auto";
  int threads = 0;
  std::string adapter;              // folder of one
  std::vector<std::string> method;  // or a freshly initialized method: its name, then key=value overrides
  std::uint64_t seed = 0;           // of what a method draws at its start
  bool any_base = false;            // of a run: also where its base model changed since training

  // seeded: the verb has a --seed of its own
  void add_to(CLI::App& verb, bool seeded = false);
  // Opens the checkpoint and says what differs from other tools.
  Checkpoint open() const;
  // The model with its adapter or method; without either as it is, where `train_all` makes every tensor trainable.
  AdaptedModel load(const Checkpoint& checkpoint, bool train_all = false) const;
};

// Words of a command line: those with a "=" are settings, unless a file is called that.
struct RecipeWords {
  std::vector<std::string> recipes, settings;
};
RecipeWords split_words(const std::vector<std::string>& words);

// "1,2,3" or "1 2 3"; `where` names the option in errors.
std::vector<std::int64_t> parse_tokens(std::string_view text, std::string_view where);

}  // namespace tapetune::cli
