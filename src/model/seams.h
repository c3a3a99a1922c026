// The four places where a method may act on a plain Llama. Each has the plain choice as its default, so that a model
// with `Seams` as it is here is Llama, and a method overrides only what it changes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "checkpoint/config.h"
#include "model/attention.h"
#include "model/linear.h"
#include "model/rotary.h"

namespace tapetune {

enum class Projection { q, k, v, o, gate, up, down };

class Seams {
 public:
  virtual ~Seams() = default;

  // linear: what comes out of a frozen projection, with what is added to it.
  virtual at::Tensor linear(std::int64_t layer, Projection which, const Linear& frozen, const at::Tensor& x) const;

  // rotary: which frequencies and which time scale for a sequence that may reach this length.
  virtual Frequencies rotary(const ModelConfig& config, std::int64_t length) const;

  // attention: who sees whom. `attended` is the position state under the same attention weights, for methods that use
  // it.
  struct Attended {
    at::Tensor values;       // [B, H, N, D]
    PositionState attended;  // undefined in plain Llama
  };
  virtual Attended attention(const AttentionInput& in, const PositionState& position) const;

  // position: how the position state changes on its way to the next layer.
  virtual PositionState after_attention(std::int64_t layer, PositionState position,
                                        const PositionState& attended) const;
  virtual PositionState after_mlp(std::int64_t layer, PositionState position, const at::Tensor& mlp_output) const;
};

}  // namespace tapetune
