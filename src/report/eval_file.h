// What a comparison measures: the file behind `compare --eval`, in YAML or JSON.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "eval/perplexity.h"

namespace tapetune {

struct PasskeyPlan {
  std::vector<std::int64_t> contexts;  // tokens of a prompt; empty: those of perplexity
  std::int64_t depths = 5, trials = 5;
  std::uint64_t seed = 0;
};

struct EvalPlan {
  std::vector<std::string> data;       // token files; empty: what the recipes hold out
  std::vector<std::int64_t> contexts;  // empty: powers of two, from an eighth of the trained context to twice as many
  Protocol protocol = Protocol::sliding;
  std::int64_t stride = -1;  // as in PerplexityOptions
  std::int64_t limit = 0;    // tokens of each text; 0: all
  std::optional<PasskeyPlan> passkey;
};

// Fails, naming the line, on a key that is none and on a value that the key cannot take.
EvalPlan parse_eval_plan(const std::string& text, std::string_view where);
EvalPlan read_eval_plan(const std::filesystem::path& file);

}  // namespace tapetune
