// A checkpoint's tensors, mapped and zero-copy.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/folder.h"
#include "checkpoint/weights.h"

namespace tapetune {

// A tensor over the mapped bytes; unaligned data is copied. Read-only: writing to it ends the program.
at::Tensor tensor_from(const StoredTensor& stored);
// Some rows of it, for streams: the memory behind them is given back when the result goes.
at::Tensor rows_from(const StoredTensor& stored, std::int64_t begin, std::int64_t count);
// How many of them make a good piece: about four million numbers.
std::int64_t rows_at_once(const std::vector<std::int64_t>& shape);

// A position encoding, which may store tensors beside those of the architecture.
struct StoredEncoding {
  std::string_view type;                                             // config.json's position.type
  bool (*owns)(const ModelConfig& config, std::string_view tensor);  // null: it stores none
};

// Fails where config.json asks for a position encoding that is none of these; `where` names the file.
void require_known_position(const ModelConfig& config, std::span<const StoredEncoding> encodings,
                            std::string_view where);

class Checkpoint {
 public:
  // Fails, before any tensor is touched, when one is missing, misshapen, of a dtype that cannot be read, or belongs
  // neither to the architecture nor to one of these encodings. Where config.json names no encoding, its tensors do.
  static Checkpoint open(const std::filesystem::path& folder, std::span<const StoredEncoding> encodings = {});

  const ModelConfig& config() const { return folder_.config; }
  const std::filesystem::path& path() const { return folder_.path; }
  const StoredTensors& stored() const { return folder_.tensors; }
  std::size_t shards() const { return folder_.shards; }
  // The dtype of the weights: that of most parameters.
  at::ScalarType dtype() const;
  std::uint64_t bytes() const;
  // Of names, shapes, dtypes and numbers, whatever the shards: "blake3-" and 64 digits. Reads everything, piece by
  // piece; `between` is called after each with its bytes and may throw.
  std::string hash(const std::function<void(std::uint64_t bytes)>& between = {}) const;

  bool has(std::string_view name) const { return folder_.tensors.contains(name); }
  at::Tensor tensor(std::string_view name) const;

 private:
  CheckpointFolder folder_;
};

// On the CPU the weights stay mapped; a GPU gets a copy, tensor by tensor.
LlamaWeights map_weights(const Checkpoint& checkpoint, at::Device device = at::kCPU);

}  // namespace tapetune
