// From positions to angles: the frequencies of every rotary variant, and the position state that they start.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "checkpoint/config.h"

namespace tapetune {

struct Frequencies {
  at::Tensor inverse;             // [D/2] f32 or f64
  double attention_factor = 1.0;  // on cos and sin
};

// The frequencies for a sequence of this length; only dynamic and longrope look at it. As transformers computes them,
// in f32, or in f64 where that is asked for.
Frequencies rotary_frequencies(const RopeConfig& rope, std::int64_t head_dim, std::int64_t context, std::int64_t length,
                               at::ScalarType dtype = at::kFloat);

// A length with the same frequencies as `length`, one for all lengths that share them.
std::int64_t equivalent_length(const RopeConfig& rope, std::int64_t context, std::int64_t length);

// The position state that a model starts with: what a token knows of its position, per channel a pair (cos, sin) for
// each frequency. Plain Llama has one channel for all heads and never changes it; a method may keep more channels and
// update them from layer to layer. Computed in f32, or in f64 where that is asked for.
at::Tensor cos_sin(const Frequencies& frequencies, const at::Tensor& positions,
                   at::ScalarType dtype);  // [B|1, N] -> [B|1, N, 1, D]: cos, then sin

}  // namespace tapetune
