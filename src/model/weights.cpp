#include "model/weights.h"

#include <ATen/CPUGeneratorImpl.h>

namespace tapetune {

namespace {

// Where the tensors of expected_tensors live, in the same order.
std::vector<at::Tensor*> places(const ModelConfig& config, LlamaWeights& weights) {
  std::vector<at::Tensor*> all;
  const auto add = [&](Linear& linear, bool bias) {
    all.push_back(&linear.weight);
    if (bias) all.push_back(&linear.bias);
  };
  all.push_back(&weights.embedding);
  for (LayerWeights& layer : weights.layers) {
    all.push_back(&layer.input_norm);
    for (Linear* linear : {&layer.q, &layer.k, &layer.v}) add(*linear, config.qkv_bias);
    add(layer.o, config.output_bias);
    all.push_back(&layer.post_attention_norm);
    for (Linear* linear : {&layer.gate, &layer.up, &layer.down}) add(*linear, config.mlp_bias);
  }
  all.push_back(&weights.norm);
  if (!config.tied_embeddings) all.push_back(&weights.head.weight);
  return all;
}

}  // namespace

std::array<Linear*, 7> linears(LayerWeights& w) { return {&w.q, &w.k, &w.v, &w.o, &w.gate, &w.up, &w.down}; }
std::array<const Linear*, 7> linears(const LayerWeights& w) {
  return {&w.q, &w.k, &w.v, &w.o, &w.gate, &w.up, &w.down};
}

LlamaWeights make_weights(const ModelConfig& config, const std::function<at::Tensor(const ExpectedTensor&)>& make) {
  LlamaWeights weights;
  weights.layers.resize(static_cast<std::size_t>(config.layers));
  const std::vector<ExpectedTensor> expected = expected_tensors(config);
  const std::vector<at::Tensor*> all = places(config, weights);
  for (std::size_t i = 0; i < all.size(); ++i) *all[i] = make(expected[i]);
  if (config.tied_embeddings) weights.head.weight = weights.embedding;
  return weights;
}

std::vector<std::pair<std::string, at::Tensor>> named_weights(const ModelConfig& config, const LlamaWeights& weights) {
  LlamaWeights copy = weights;  // of the handles
  const std::vector<ExpectedTensor> expected = expected_tensors(config);
  const std::vector<at::Tensor*> all = places(config, copy);
  std::vector<std::pair<std::string, at::Tensor>> named;
  named.reserve(all.size());
  for (std::size_t i = 0; i < all.size(); ++i) named.emplace_back(expected[i].name, *all[i]);
  return named;
}

LlamaWeights random_weights(const ModelConfig& config, std::uint64_t seed, at::Device device) {
  const at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  // The usual 0.02 suits a width of 1000; in narrow models it leaves attention so near to uniform that it learns late.
  const double deviation = std::sqrt(0.4 / static_cast<double>(config.hidden_size));
  return make_weights(config, [&](const ExpectedTensor& tensor) {
    if (tensor.name.ends_with("norm.weight")) return at::ones(tensor.shape, device);
    if (tensor.name.ends_with(".bias")) return at::zeros(tensor.shape, device);
    return at::empty(tensor.shape, at::kFloat).normal_(0, deviation, generator).to(device);
  });
}

LlamaWeights map_weights(const Checkpoint& checkpoint, at::Device device) {
  return make_weights(checkpoint.config(),
                      [&](const ExpectedTensor& expected) { return checkpoint.tensor(expected.name).to(device); });
}

}  // namespace tapetune
