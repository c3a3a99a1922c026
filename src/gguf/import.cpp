#include "gguf/import.h"

#include <ATen/Parallel.h>

#include <set>

#include "checkpoint/checkpoint.h"
#include "checkpoint/writer.h"
#include "core/error.h"
#include "gguf/names.h"
#include "gguf/quants.h"
#include "gguf/settings.h"
#include "gguf/tokenizer.h"

namespace tapetune::gguf {
namespace fs = std::filesystem;

namespace {

std::optional<at::ScalarType> plain_dtype(TensorType type) {
  switch (type) {
    case TensorType::f32:
      return at::kFloat;
    case TensorType::f16:
      return at::kHalf;
    case TensorType::bf16:
      return at::kBFloat16;
    default:
      return std::nullopt;
  }
}

// Plain numbers in their own dtype, blocks in f32; always a copy, since a file may lie anywhere in memory.
at::Tensor load_blocks(const StoredBlocks& stored) {
  const std::optional<at::ScalarType> plain = plain_dtype(stored.format->type);
  at::Tensor tensor = at::empty(stored.shape, plain.value_or(at::kFloat));
  if (plain) {
    std::copy(stored.bytes.begin(), stored.bytes.end(), static_cast<std::byte*>(tensor.data_ptr()));
    return tensor;
  }
  const BlockFormat& format = *stored.format;
  const std::span<float> numbers(tensor.data_ptr<float>(), static_cast<std::size_t>(tensor.numel()));
  const auto blocks = static_cast<std::int64_t>(stored.bytes.size() / format.bytes);
  at::parallel_for(0, blocks, 1024, [&](std::int64_t begin, std::int64_t end) {
    const auto first = static_cast<std::size_t>(begin), count = static_cast<std::size_t>(end - begin);
    dequantize(format, stored.bytes.subspan(first * format.bytes, count * format.bytes),
               numbers.subspan(first * format.numbers, count * format.numbers));
  });
  return tensor;
}

// From neighbours to halves: [H * D, ...] with D as (D/2, 2) to D as (2, D/2).
at::Tensor halves_from_neighbours(const at::Tensor& rows, std::int64_t heads) {
  const std::int64_t half = rows.size(0) / heads / 2;
  return rows.view({heads, half, 2, -1}).transpose(1, 2).reshape(rows.sizes());
}

const StoredBlocks& find(const File& file, const TensorSpec& expected) {
  const std::string name = tensor_name(expected.name);
  const StoredBlocks* stored = file.tensor(name);
  if (stored == nullptr) {
    fail("gguf", "{}: tensor {} {} is missing; the file is incomplete or of a model that tapetune does not know.",
         file.where(), name, shape_text(expected.shape));
  }
  if (stored->shape != expected.shape) {
    fail("gguf", "{}: {}: expected {}, but the file has {}; its metadata is of another model.", file.where(), name,
         shape_text(expected.shape), shape_text(stored->shape));
  }
  return *stored;
}

// A tensor that we do not know changes what the model computes; leaving it out would give another model.
void refuse_others(const File& file, const std::vector<TensorSpec>& expected) {
  std::set<std::string> known{rope_factors_name};
  for (const TensorSpec& tensor : expected) known.insert(tensor_name(tensor.name));
  for (const auto& [name, stored] : file.tensors()) {
    if (!known.contains(name)) {
      fail("gguf", "{}: has a tensor {}, which no plain model of this architecture has; tapetune cannot import it.",
           file.where(), name);
    }
  }
}

at::Tensor narrowed(const at::Tensor& tensor, at::ScalarType dtype, const std::string& name) {
  at::Tensor result = tensor.to(dtype);
  if (dtype == at::kHalf && tensor.scalar_type() != at::kHalf && !at::isfinite(result).all().item<bool>()) {
    fail("gguf", "{} has numbers that are too large for f16; give --dtype bf16 or f32.", name);
  }
  return result;
}

}  // namespace

void import_gguf(const fs::path& path, const fs::path& folder, const ImportOptions& options) {
  const File file = File::open(path);
  const ModelConfig config = read_settings(file);
  const std::vector<TensorSpec> expected = tensor_specs(config);
  bool quantised = false;
  for (const TensorSpec& tensor : expected) quantised |= !plain_dtype(find(file, tensor).format->type);
  refuse_others(file, expected);

  std::vector<PlannedTensor> plan;
  std::map<std::string, const StoredBlocks*> sources;
  for (const TensorSpec& tensor : expected) {
    const StoredBlocks& stored = find(file, tensor);
    const at::ScalarType natural = quantised ? at::kFloat : plain_dtype(stored.format->type).value();
    plan.push_back({tensor.name, options.dtype.value_or(natural), tensor.shape});
    sources[tensor.name] = &stored;
  }
  WriteOptions write;
  write.shard_bytes = options.shard_bytes;
  write.replace = options.replace;
  write.files = read_tokenizer(file, config);
  const auto load = [&](const std::string& name) {
    const at::Tensor tensor = load_blocks(*sources.at(name));
    const std::int64_t heads = reordered_heads(name, config);
    const at::Tensor ordered = heads == 0 ? tensor : halves_from_neighbours(tensor, heads);
    return options.dtype ? narrowed(ordered, *options.dtype, name) : ordered;
  };
  write_checkpoint(folder, config, plan, load, write);
}

}  // namespace tapetune::gguf
