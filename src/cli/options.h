// What several verbs share on the command line.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "model/llama.h"

namespace CLI {
class App;
}

namespace tapetune::cli {

// The model of a verb and how to compute with it.
struct ModelOptions {
  std::string folder;
  std::string dtype = "auto";
  std::string device = "cpu";
  int threads = 0;

  void add_to(CLI::App& verb);
  // Opens the checkpoint and says what differs from other tools.
  Checkpoint open() const;
  Llama load(const Checkpoint& checkpoint) const;
};

// "1,2,3" or "1 2 3"; `where` names the option in errors.
std::vector<std::int64_t> parse_tokens(std::string_view text, std::string_view where);

}  // namespace tapetune::cli
