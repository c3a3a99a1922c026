// A tokenizer as GGUF metadata, in both directions: byte-level BPE ("gpt2") and sentencepiece's BPE ("llama").
#pragma once

#include <filesystem>
#include <map>
#include <string>

#include "checkpoint/config.h"
#include "gguf/metadata.h"
#include "gguf/reader.h"

namespace tapetune::gguf {

inline constexpr const char* sentencepiece_space = "\xe2\x96\x81";  // U+2581 stands for a space

// tokenizer.json and tokenizer_config.json by name; nothing, with a warning, where the file has no vocabulary.
std::map<std::string, std::string> read_tokenizer(const File& file, const ModelConfig& config);

// The keys that llama.cpp needs, from a folder with tokenizer.json. Refuses kinds that llama.cpp has no name for.
void write_tokenizer(Metadata& metadata, const std::filesystem::path& folder, const ModelConfig& config);

}  // namespace tapetune::gguf
