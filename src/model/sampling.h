// Choosing the next token from its logits.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <random>

namespace tapetune {

struct SamplingOptions {
  double temperature = 0.0;  // 0: the most likely token
  std::int64_t top_k = 0;    // 0: all
  double top_p = 1.0;        // the smallest set of tokens with at least this much probability
  std::uint64_t seed = 0;
};

class Sampler {
 public:
  explicit Sampler(const SamplingOptions& options);
  std::int64_t next(const at::Tensor& logits);  // [vocab]

 private:
  SamplingOptions options_;
  std::mt19937_64 random_;
};

}  // namespace tapetune
