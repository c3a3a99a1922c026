#include "gguf/names.h"

#include <array>

#include "core/error.h"

namespace tapetune::gguf {

namespace {

struct Pair {
  std::string_view checkpoint, gguf;
};

constexpr std::array<Pair, 3> outer{{
    {"model.embed_tokens.", "token_embd."},
    {"model.norm.", "output_norm."},
    {"lm_head.", "output."},
}};

constexpr std::array<Pair, 9> in_layer{{
    {"input_layernorm.", "attn_norm."},
    {"self_attn.q_proj.", "attn_q."},
    {"self_attn.k_proj.", "attn_k."},
    {"self_attn.v_proj.", "attn_v."},
    {"self_attn.o_proj.", "attn_output."},
    {"post_attention_layernorm.", "ffn_norm."},
    {"mlp.gate_proj.", "ffn_gate."},
    {"mlp.up_proj.", "ffn_up."},
    {"mlp.down_proj.", "ffn_down."},
}};

template <typename Pairs>
std::string replaced(const Pairs& pairs, std::string_view name) {
  for (const Pair& pair : pairs) {
    if (name.starts_with(pair.checkpoint)) return fmt::format("{}{}", pair.gguf, name.substr(pair.checkpoint.size()));
  }
  return {};
}

}  // namespace

std::string tensor_name(std::string_view checkpoint_name) {
  constexpr std::string_view layers = "model.layers.";
  std::string name;
  if (checkpoint_name.starts_with(layers)) {
    const std::string_view rest = checkpoint_name.substr(layers.size());
    const std::size_t dot = rest.find('.');
    const std::string inner = dot == rest.npos ? std::string() : replaced(in_layer, rest.substr(dot + 1));
    if (!inner.empty()) name = fmt::format("blk.{}.{}", rest.substr(0, dot), inner);
  } else {
    name = replaced(outer, checkpoint_name);
  }
  if (name.empty()) fail("gguf", "tensor {} has no name in GGUF.", checkpoint_name);
  return name;
}

std::int64_t reordered_heads(std::string_view checkpoint_name, const ModelConfig& config) {
  if (config.architecture == Architecture::qwen2) return 0;
  if (checkpoint_name.find(".q_proj.") != checkpoint_name.npos) return config.heads;
  if (checkpoint_name.find(".k_proj.") != checkpoint_name.npos) return config.kv_heads;
  return 0;
}

}  // namespace tapetune::gguf
