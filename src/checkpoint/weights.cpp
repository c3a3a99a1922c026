#include "checkpoint/weights.h"

#include <ATen/CPUGeneratorImpl.h>
#include <fmt/core.h>

namespace tapetune {

void for_each_tensor(const ModelConfig& c, std::int64_t layer, LayerWeights& w, const VisitTensor& visit) {
  const std::string prefix = fmt::format("model.layers.{}.", layer);
  const auto norm = [&](const char* name, at::Tensor& tensor, std::int64_t width) {
    visit({fmt::format("{}{}.weight", prefix, name), {width}, TensorKind::norm, std::nullopt}, tensor);
  };
  const auto linear = [&](const char* name, Projection which, Linear& tensors, std::int64_t out, std::int64_t in,
                          bool bias) {
    const std::string module = prefix + name;
    visit({module + ".weight", {out, in}, TensorKind::weight, which}, tensors.weight);
    if (bias) visit({module + ".bias", {out}, TensorKind::bias, which}, tensors.bias);
  };
  const std::int64_t queries = c.heads * c.head_dim, keys = c.kv_heads * c.head_dim;
  norm("input_layernorm", w.input_norm, c.hidden_size);
  linear("self_attn.q_proj", Projection::q, w.q, queries, c.hidden_size, c.qkv_bias);
  linear("self_attn.k_proj", Projection::k, w.k, keys, c.hidden_size, c.qkv_bias);
  linear("self_attn.v_proj", Projection::v, w.v, keys, c.hidden_size, c.qkv_bias);
  linear("self_attn.o_proj", Projection::o, w.o, c.hidden_size, queries, c.output_bias);
  if (c.qk_norm) {
    norm("self_attn.q_norm", w.q_norm, c.head_dim);
    norm("self_attn.k_norm", w.k_norm, c.head_dim);
  }
  norm("post_attention_layernorm", w.post_attention_norm, c.hidden_size);
  linear("mlp.gate_proj", Projection::gate, w.gate, c.intermediate_size, c.hidden_size, c.mlp_bias);
  linear("mlp.up_proj", Projection::up, w.up, c.intermediate_size, c.hidden_size, c.mlp_bias);
  linear("mlp.down_proj", Projection::down, w.down, c.hidden_size, c.intermediate_size, c.mlp_bias);
}

void for_each_tensor(const ModelConfig& c, LlamaWeights& w, const VisitTensor& visit) {
  visit({"model.embed_tokens.weight", {c.vocab_size, c.hidden_size}, TensorKind::embedding, std::nullopt}, w.embedding);
  for (std::size_t i = 0; i < w.layers.size(); ++i) {
    for_each_tensor(c, static_cast<std::int64_t>(i), w.layers[i], visit);
  }
  visit({"model.norm.weight", {c.hidden_size}, TensorKind::norm, std::nullopt}, w.norm);
  if (c.tied_embeddings) return;
  visit({"lm_head.weight", {c.vocab_size, c.hidden_size}, TensorKind::head, Projection::head}, w.head.weight);
}

void for_each_tensor(const ModelConfig& config, const LlamaWeights& weights, const VisitConstTensor& visit) {
  LlamaWeights handles = weights;
  for_each_tensor(config, handles, VisitTensor(visit));
}

std::vector<TensorSpec> tensor_specs(const ModelConfig& config) {
  std::vector<TensorSpec> all;
  make_weights(config, [&](const TensorSpec& spec) {
    all.push_back(spec);
    return at::Tensor();
  });
  return all;
}

std::array<Linear*, 7> linears(LayerWeights& w) { return {&w.q, &w.k, &w.v, &w.o, &w.gate, &w.up, &w.down}; }
std::array<const Linear*, 7> linears(const LayerWeights& w) {
  return {&w.q, &w.k, &w.v, &w.o, &w.gate, &w.up, &w.down};
}

LlamaWeights make_weights(const ModelConfig& config, const std::function<at::Tensor(const TensorSpec&)>& make) {
  LlamaWeights weights;
  weights.layers.resize(static_cast<std::size_t>(config.layers));
  for_each_tensor(config, weights, [&](const TensorSpec& spec, at::Tensor& tensor) { tensor = make(spec); });
  if (config.tied_embeddings) weights.head.weight = weights.embedding;
  return weights;
}

std::vector<std::pair<std::string, at::Tensor>> named_weights(const ModelConfig& config, const LlamaWeights& weights) {
  std::vector<std::pair<std::string, at::Tensor>> named;
  for_each_tensor(config, weights,
                  [&](const TensorSpec& spec, const at::Tensor& tensor) { named.emplace_back(spec.name, tensor); });
  return named;
}

LlamaWeights random_weights(const ModelConfig& config, std::uint64_t seed, at::Device device) {
  const at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  // The usual 0.02 suits a width of 1000; in narrow models it leaves attention so near to uniform that it learns late.
  const double deviation = std::sqrt(0.4 / static_cast<double>(config.hidden_size));
  return make_weights(config, [&](const TensorSpec& tensor) {
    if (tensor.kind == TensorKind::norm) return at::ones(tensor.shape, device);
    if (tensor.kind == TensorKind::bias) return at::zeros(tensor.shape, device);
    return at::empty(tensor.shape, at::kFloat).normal_(0, deviation, generator).to(device);
  });
}

}  // namespace tapetune
