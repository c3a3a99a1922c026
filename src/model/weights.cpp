#include "model/weights.h"

namespace tapetune {

LlamaWeights map_weights(const Checkpoint& checkpoint, at::Device device) {
  const ModelConfig& config = checkpoint.config();
  const auto tensor = [&](const std::string& name) { return checkpoint.tensor(name).to(device); };
  const auto linear = [&](const std::string& name, bool bias) {
    return Linear{tensor(name + ".weight"), bias ? tensor(name + ".bias") : at::Tensor()};
  };
  LlamaWeights weights;
  weights.embedding = tensor("model.embed_tokens.weight");
  for (std::int64_t i = 0; i < config.layers; ++i) {
    const std::string layer = fmt::format("model.layers.{}.", i);
    weights.layers.push_back(
        {tensor(layer + "input_layernorm.weight"), linear(layer + "self_attn.q_proj", config.qkv_bias),
         linear(layer + "self_attn.k_proj", config.qkv_bias), linear(layer + "self_attn.v_proj", config.qkv_bias),
         linear(layer + "self_attn.o_proj", config.output_bias), tensor(layer + "post_attention_layernorm.weight"),
         linear(layer + "mlp.gate_proj", config.mlp_bias), linear(layer + "mlp.up_proj", config.mlp_bias),
         linear(layer + "mlp.down_proj", config.mlp_bias)});
  }
  weights.norm = tensor("model.norm.weight");
  weights.head = config.tied_embeddings ? Linear{weights.embedding, {}} : linear("lm_head", false);
  return weights;
}

}  // namespace tapetune
