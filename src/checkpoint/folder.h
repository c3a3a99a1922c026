// A Hugging Face folder on disk: config.json, and one or more mapped safetensors shards. No tensors yet.
#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/config.h"
#include "core/file.h"
#include "hf/safetensors.h"

namespace tapetune {

struct StoredTensor {
  TensorEntry entry;
  std::shared_ptr<const MappedFile> file;
  std::span<const std::byte> bytes;  // within the mapped file; may be unaligned
};

// Every tensor by name, from all shards.
using StoredTensors = std::map<std::string, StoredTensor, std::less<>>;

// model.safetensors.index.json: which shard holds a tensor. `where` names the file in errors.
std::map<std::string, std::string> parse_index(std::string_view json, std::string_view where);

// Adds the tensors of one safetensors file.
void map_safetensors(const std::filesystem::path& path, StoredTensors& tensors);

// The safetensors files of a checkpoint: model.safetensors, or the shards that its index names, in order. Fails where
// there is neither.
std::vector<std::filesystem::path> weight_files(const std::filesystem::path& folder);

// Fails, naming `import`, where this is a GGUF file, or a folder that holds one in place of a checkpoint.
void refuse_gguf(const std::filesystem::path& path);

struct CheckpointFolder {
  static CheckpointFolder open(const std::filesystem::path& folder);

  std::filesystem::path path;
  ModelConfig config;
  StoredTensors tensors;
  std::size_t shards = 0;
};

}  // namespace tapetune
