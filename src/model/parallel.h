// A model that several processes compute together. The model knows neither processes nor networks, only these calls.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "checkpoint/weights.h"

namespace tapetune {

struct Parallel {
  // Of every sequence this process holds part number `sequence_rank` of `sequence_size` equal ones (S below).
  std::int64_t sequence_rank = 0, sequence_size = 1;
  // Attention needs all tokens, but can do with some heads: [B, N / S, H, D] -> [B, N, H / S, D], all tensors alike,
  // and back. With gradients, which bring AttentionOutput::lse its own, where it is defined; empty where S is 1.
  std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)> to_heads;
  std::function<at::Tensor(const at::Tensor&, const at::Tensor& lse)> to_tokens;

  // Frozen weights that are sharded are all-gathered for their use. `again`: the layer is computed for its
  // gradients, so that the one before it will be next. Empty: the weights are whole.
  std::function<LayerWeights(std::int64_t layer, bool again)> layer;
  std::function<at::Tensor()> embedding;
  std::function<Linear()> head;
};

}  // namespace tapetune
