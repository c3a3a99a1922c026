// Writes a Hugging Face checkpoint tensor by tensor: whole or not at all, and never more than two tensors in memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/config.h"

namespace tapetune {

struct PlannedTensor {
  std::string name;
  at::ScalarType dtype;
  std::vector<std::int64_t> shape;
};

struct WriteOptions {
  std::uint64_t shard_bytes = 5'000'000'000;  // decimal, as everywhere in this field
  bool replace = false;                       // an existing folder
  std::filesystem::path carry_from;           // where tokenizer and generation files come from; empty: none
};

// The plan lists the tensors in the model's order; `load` gives each one when its turn comes.
void write_checkpoint(const std::filesystem::path& folder, const ModelConfig& config,
                      const std::vector<PlannedTensor>& plan,
                      const std::function<at::Tensor(const std::string& name)>& load, const WriteOptions& options = {});

// One safetensors file with these tensors, written whole.
void save_safetensors(const std::filesystem::path& path, const std::map<std::string, at::Tensor>& tensors, bool replace,
                      const std::map<std::string, std::string>& metadata = {});

// "5GB", "200MB", "1000000"; fails with the rule when it is none.
std::uint64_t parse_size(std::string_view text);

}  // namespace tapetune
