#include "model/seams.h"

namespace tapetune {

at::Tensor Seams::linear(std::int64_t, Projection, const Linear& frozen, const at::Tensor& x) const {
  return apply(frozen, x);
}

Frequencies Seams::rotary(const ModelConfig& config, std::int64_t length) const {
  return rotary_frequencies(config.rope, config.head_dim, config.context, length);
}

Seams::Attended Seams::attention(const AttentionInput& in, const PositionState&) const {
  return {causal_attention(in), {}};
}

PositionState Seams::after_attention(std::int64_t, PositionState position, const PositionState&) const {
  return position;
}

PositionState Seams::after_mlp(std::int64_t, PositionState position, const at::Tensor&) const { return position; }

}  // namespace tapetune
