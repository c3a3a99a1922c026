// The file given as `compare --eval`: what a comparison evaluates, in YAML or JSON.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "eval/perplexity.h"

namespace tapetune {

struct PasskeyPlan {
  std::vector<std::int64_t> contexts;  // tokens of a prompt; empty: the same as for perplexity
  std::int64_t depths = 5, trials = 5;
  std::uint64_t seed = 0;
};

struct EvalPlan {
  std::vector<std::string> data;       // token files; empty: the recipes' held-out data
  std::vector<std::int64_t> contexts;  // empty: from an eighth of the training context to twice that context
  Protocol protocol = Protocol::sliding;
  std::int64_t stride = -1;  // as in PerplexityOptions
  std::int64_t limit = 0;    // tokens of each text; 0: all
  std::optional<PasskeyPlan> passkey;
};

// Fails, naming the line, on an unknown key or an invalid value.
EvalPlan parse_eval_plan(const std::string& text, std::string_view where);
EvalPlan read_eval_plan(const std::filesystem::path& file);

}  // namespace tapetune
