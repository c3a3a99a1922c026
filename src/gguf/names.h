// What tensors are called: in Hugging Face's folders and in GGUF.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "checkpoint/config.h"

namespace tapetune::gguf {

// "blk.3.attn_q.weight" for "model.layers.3.self_attn.q_proj.weight".
std::string tensor_name(std::string_view checkpoint_name);

// How many heads' rows llama.cpp keeps in another order in this tensor; 0 where it does not. Its llama architecture
// rotates neighbours, Hugging Face's the two halves of a head; its qwen2 architecture rotates halves too.
std::int64_t reordered_heads(std::string_view checkpoint_name, const ModelConfig& config);

}  // namespace tapetune::gguf
