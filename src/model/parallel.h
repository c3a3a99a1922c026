// A model that several processes compute together. The model knows neither processes nor networks, only these calls.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "checkpoint/weights.h"

namespace tapetune {

// Every process holds one of `size` equal parts (S below) of each sequence. Attention needs all tokens, but can do with
// some heads: rank r gets the r-th part of them, [B, N / S, H, D] -> [B, N, H / S, D], and back. Plain exchanges: no
// gradient flows through. Undefined tensors stay undefined.
struct SequenceExchange {
  std::int64_t rank = 0, size = 1;
  std::function<std::vector<at::Tensor>(std::vector<at::Tensor>)> to_heads, to_tokens;
};

struct Parallel {
  std::int64_t sequence_rank = 0, sequence_size = 1;
  std::shared_ptr<const SequenceExchange> exchange;  // null where S is 1

  // Frozen weights that are sharded are all-gathered for their use. `again`: the layer is computed for its
  // gradients, so that the one before it will be next. Empty: the weights are whole.
  std::function<LayerWeights(std::int64_t layer, bool again)> layer;
  std::function<at::Tensor()> embedding;
  std::function<Linear()> head;
};

}  // namespace tapetune
