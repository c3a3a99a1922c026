// The tensors of a Llama, as they are on disk: mapped, in the file's dtype.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "checkpoint/checkpoint.h"
#include "model/linear.h"

namespace tapetune {

struct LayerWeights {
  at::Tensor input_norm;           // [hidden]
  Linear q, k, v, o;               // [H D, hidden], [K D, hidden], [K D, hidden], [hidden, H D]
  at::Tensor post_attention_norm;  // [hidden]
  Linear gate, up, down;           // [I, hidden], [I, hidden], [hidden, I]
};

struct LlamaWeights {
  at::Tensor embedding;  // [vocab, hidden]
  std::vector<LayerWeights> layers;
  at::Tensor norm;  // [hidden]
  Linear head;      // [vocab, hidden]; the embedding itself where tied
};

// On the CPU the weights stay mapped; a GPU gets a copy, tensor by tensor.
LlamaWeights map_weights(const Checkpoint& checkpoint, at::Device device = at::kCPU);

}  // namespace tapetune
