// Text generation: a prefill per prompt, then all prompts together token by token.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "model/llama.h"
#include "model/sampling.h"

namespace tapetune {

struct GenerateOptions {
  std::int64_t max_new_tokens = 256;
  std::vector<std::int64_t> eos;  // any of these ends a text; empty: none does
  std::int64_t context = 0;       // no text grows beyond this many tokens
  bool use_cache = true;
  SamplingOptions sampling;
};

enum class Stop { eos, length, context, interrupted };
std::string_view stop_name(Stop stop);

struct Generated {
  std::vector<std::int64_t> tokens;  // new ones; an EOS is among them
  Stop stop = Stop::length;
};

struct GenerateTimes {
  std::int64_t prefill_tokens = 0, decode_tokens = 0;
  std::vector<double> prefill_seconds;  // a prompt each: the first also brings the weights into memory
  double decode_seconds = 0;
};

// A prompt gives the same tokens alone and in company: each is prefilled by itself and decoded with sums of its own.
std::vector<Generated> generate(const Llama& model, const std::vector<std::vector<std::int64_t>>& prompts,
                                const GenerateOptions& options,
                                const std::function<void(std::size_t prompt, std::int64_t token)>& on_token = {},
                                GenerateTimes* times = nullptr);

}  // namespace tapetune
