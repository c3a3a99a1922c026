// config.json of merged models that no other tool may run as a Llama with RoPE.
#pragma once

#include <filesystem>

#include "adapters/component.h"

namespace tapetune {

// The settings of all Llama-like architectures, whose defaults differ, written out, and the name of the encoding.
void write_position(Json& config_json, const ModelConfig& config, Json position);

// For encodings that only tapetune computes: an architecture that transformers, vLLM and llama.cpp refuse.
void export_own_architecture(const Settings& settings, const ModelConfig& config,
                             const std::filesystem::path& tokenizer, Files& files);

}  // namespace tapetune
