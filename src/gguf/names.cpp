#include "gguf/names.h"

#include <algorithm>
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

constexpr std::array<Pair, 11> in_layer{{
    {"input_layernorm.", "attn_norm."},
    {"self_attn.q_proj.", "attn_q."},
    {"self_attn.k_proj.", "attn_k."},
    {"self_attn.v_proj.", "attn_v."},
    {"self_attn.o_proj.", "attn_output."},
    {"self_attn.q_norm.", "attn_q_norm."},
    {"self_attn.k_norm.", "attn_k_norm."},
    {"post_attention_layernorm.", "ffn_norm."},
    {"mlp.gate_proj.", "ffn_gate."},
    {"mlp.up_proj.", "ffn_up."},
    {"mlp.down_proj.", "ffn_down."},
}};

// By Architecture.
constexpr std::array<std::string_view, 5> names{"llama", "llama", "qwen2", "qwen3", "smollm3"};

template <typename Pairs>
std::string replaced(const Pairs& pairs, std::string_view name) {
  for (const Pair& pair : pairs) {
    if (name.starts_with(pair.checkpoint)) return fmt::format("{}{}", pair.gguf, name.substr(pair.checkpoint.size()));
  }
  return {};
}

}  // namespace

std::string_view llama_cpp_name(Architecture architecture) { return names[static_cast<std::size_t>(architecture)]; }

std::optional<Architecture> architecture_from_llama_cpp(std::string_view name) {
  const auto* const found = std::ranges::find(names, name);
  return found == names.end() ? std::nullopt : std::optional(static_cast<Architecture>(found - names.begin()));
}

std::string llama_cpp_names() {
  std::string list;
  for (std::size_t i = 1; i < names.size(); ++i) list += fmt::format("{}{}", i == 1 ? "" : ", ", names[i]);
  return list;
}

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
  if (config.architecture == Architecture::qwen2 || config.architecture == Architecture::qwen3) return 0;
  if (checkpoint_name.find(".q_proj.") != checkpoint_name.npos) return config.heads;
  if (checkpoint_name.find(".k_proj.") != checkpoint_name.npos) return config.kv_heads;
  return 0;
}

}  // namespace tapetune::gguf
