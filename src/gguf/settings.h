// A model's settings as GGUF metadata, in both directions.
#pragma once

#include <vector>

#include "checkpoint/config.h"
#include "gguf/metadata.h"
#include "gguf/reader.h"

namespace tapetune::gguf {

constexpr const char* rope_factors_name = "rope_freqs.weight";

// Refuses architectures and rotary settings that tapetune or Hugging Face's config.json cannot say.
ModelConfig read_settings(const File& file);

// The keys that llama.cpp's own converter writes. Refuses what llama.cpp cannot compute.
void write_settings(Metadata& metadata, const ModelConfig& config);

// llama3's scaling is stored as a divisor for each frequency. [head_dim / 2]
std::vector<float> llama3_factors(const RopeConfig& rope, std::int64_t head_dim);

}  // namespace tapetune::gguf
