// The tensors of a Llama: what they are called, what shape they have, and where a model keeps them. One list serves
// reading, writing, random starts, full fine-tuning, estimates and GGUF.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/config.h"

namespace tapetune {

enum class Projection { q, k, v, o, gate, up, down, head };

struct Linear {
  at::Tensor weight;  // [out, in], in the file's dtype and mapped
  at::Tensor bias;    // [out], or undefined
};

struct LayerWeights {
  at::Tensor input_norm;           // [hidden]
  Linear q, k, v, o;               // [H D, hidden], [K D, hidden], [K D, hidden], [hidden, H D]
  at::Tensor q_norm, k_norm;       // [D], or undefined
  at::Tensor post_attention_norm;  // [hidden]
  Linear gate, up, down;           // [I, hidden], [I, hidden], [hidden, I]
};

struct LlamaWeights {
  at::Tensor embedding;  // [vocab, hidden]
  std::vector<LayerWeights> layers;
  at::Tensor norm;  // [hidden]
  Linear head;      // [vocab, hidden]; the embedding itself where tied
};

enum class TensorKind { embedding, norm, weight, bias, head };

// A tensor without its numbers.
struct TensorSpec {
  std::string name;  // on disk
  std::vector<std::int64_t> shape;
  TensorKind kind;
  std::optional<Projection> projection;  // that a weight or bias is of
};

using VisitTensor = std::function<void(const TensorSpec& spec, at::Tensor& tensor)>;
using VisitConstTensor = std::function<void(const TensorSpec& spec, const at::Tensor& tensor)>;

// Every tensor that a checkpoint with this config has, in the order of the model. A tied head is no tensor of its own.
void for_each_tensor(const ModelConfig& config, LlamaWeights& weights, const VisitTensor& visit);
void for_each_tensor(const ModelConfig& config, const LlamaWeights& weights, const VisitConstTensor& visit);
// Those of one layer.
void for_each_tensor(const ModelConfig& config, std::int64_t layer, LayerWeights& weights, const VisitTensor& visit);
// The list alone.
std::vector<TensorSpec> tensor_specs(const ModelConfig& config);

// In the order of Projection.
std::array<Linear*, 7> linears(LayerWeights& layer);
std::array<const Linear*, 7> linears(const LayerWeights& layer);

// What `make` gives for every tensor.
LlamaWeights make_weights(const ModelConfig& config, const std::function<at::Tensor(const TensorSpec&)>& make);
// The way back: every tensor under its name on disk.
std::vector<std::pair<std::string, at::Tensor>> named_weights(const ModelConfig& config, const LlamaWeights& weights);

// A model before its first step: normal matrices, norms of one, no bias.
LlamaWeights random_weights(const ModelConfig& config, std::uint64_t seed, at::Device device = at::kCPU);

}  // namespace tapetune
