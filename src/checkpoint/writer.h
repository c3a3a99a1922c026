// Writes a Hugging Face checkpoint tensor by tensor: whole or not at all, and never more than two tensors in memory,
// the one that is being written and the one that is being made.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/config.h"
#include "core/file.h"

namespace tapetune {

struct PlannedTensor {
  std::string name;
  at::ScalarType dtype;
  std::vector<std::int64_t> shape;
};

// Whether write_checkpoint makes files of this name: config.json, weights in any number of shards, tokenizer files.
bool is_checkpoint_file(std::string_view name);

struct WriteOptions {
  std::uint64_t shard_bytes = 5'000'000'000;  // decimal, as everywhere in this field
  bool replace = false;                       // an existing folder, where it has no other files than `writes`
  std::filesystem::path carry_from;           // where tokenizer and generation files come from; empty: none
  // More such files, by name.
  std::map<std::string, std::string> files = {};
  // Called when the tensors are written, with the text files by name (these, config.json, and the index where there is
  // one), to change them and to add others.
  std::function<void(std::map<std::string, std::string>& files)> complete = {};
  WritesName writes = is_checkpoint_file;
  bool finite = false;  // the tensors are known to have neither NaN nor Inf; else one that has is refused
};

// Takes the next rows of a tensor.
using PutRows = std::function<void(const at::Tensor& rows)>;
// Gives a tensor's rows, in order, in as many parts as it likes.
using StreamTensor = std::function<void(const std::string& name, const PutRows& put)>;

// The plan lists the tensors in the model's order; `load` gives each one when its turn comes.
void write_checkpoint(const std::filesystem::path& folder, const ModelConfig& config,
                      const std::vector<PlannedTensor>& plan,
                      const std::function<at::Tensor(const std::string& name)>& load, const WriteOptions& options = {});
// The same of tensors that need never be in memory as a whole.
void stream_checkpoint(const std::filesystem::path& folder, const ModelConfig& config,
                       const std::vector<PlannedTensor>& plan, const StreamTensor& stream,
                       const WriteOptions& options = {});

// One safetensors file with these tensors, written whole.
void save_safetensors(const std::filesystem::path& path, const std::map<std::string, at::Tensor>& tensors, bool replace,
                      const std::map<std::string, std::string>& metadata = {});

// "5GB", "200MB", "1000000"; fails with the rule when it is none.
std::uint64_t parse_size(std::string_view text);

}  // namespace tapetune
