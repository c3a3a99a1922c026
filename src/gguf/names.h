// What tensors are called: in Hugging Face's folders and in GGUF.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "checkpoint/config.h"

namespace tapetune::gguf {

// "blk.3.attn_q.weight" for "model.layers.3.self_attn.q_proj.weight".
std::string tensor_name(std::string_view checkpoint_name);

// What llama.cpp calls it: "llama" (also Mistral), "qwen2", …
std::string_view llama_cpp_name(Architecture architecture);
// The way back; none for others, and "llama" is a Llama.
std::optional<Architecture> architecture_from_llama_cpp(std::string_view name);
std::string llama_cpp_names();  // "llama, qwen2, …"

// How many heads' rows llama.cpp keeps in another order in this tensor; 0 where it does not. Its llama and smollm3
// architectures rotate neighbours, Hugging Face's the two halves of a head; its qwen2 and qwen3 rotate halves too.
std::int64_t reordered_heads(std::string_view checkpoint_name, const ModelConfig& config);

}  // namespace tapetune::gguf
