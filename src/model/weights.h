// The tensors of a Llama, as they are on disk: mapped, in the file's dtype.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
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

// In the order of Projection.
std::array<Linear*, 7> linears(LayerWeights& layer);
std::array<const Linear*, 7> linears(const LayerWeights& layer);

// What `make` gives for every tensor that a checkpoint with this config would have, in expected_tensors' order.
LlamaWeights make_weights(const ModelConfig& config, const std::function<at::Tensor(const ExpectedTensor&)>& make);
// The way back: every tensor under its name on disk.
std::vector<std::pair<std::string, at::Tensor>> named_weights(const ModelConfig& config, const LlamaWeights& weights);

// A model before its first step: normal matrices, norms of one, no bias.
LlamaWeights random_weights(const ModelConfig& config, std::uint64_t seed, at::Device device = at::kCPU);

// On the CPU the weights stay mapped; a GPU gets a copy, tensor by tensor.
LlamaWeights map_weights(const Checkpoint& checkpoint, at::Device device = at::kCPU);

}  // namespace tapetune
