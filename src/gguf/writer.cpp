#include "gguf/writer.h"

#include <ATen/Parallel.h>

#include <atomic>

#include "checkpoint/checkpoint.h"
#include "core/error.h"
#include "core/file.h"
#include "core/moment.h"
#include "core/progress.h"
#include "core/signals.h"
#include "gguf/metadata.h"
#include "gguf/names.h"
#include "gguf/quants.h"
#include "gguf/settings.h"
#include "gguf/tokenizer.h"

namespace tapetune::gguf {
namespace fs = std::filesystem;

namespace {

struct Planned {
  std::string source;  // its name in the checkpoint; empty for the rotary factors
  std::string name;
  std::vector<std::int64_t> shape;
  const BlockFormat* format = nullptr;
  std::uint64_t offset = 0, bytes = 0;
};

std::uint64_t aligned(std::uint64_t bytes) {
  return (bytes + default_alignment - 1) / default_alignment * default_alignment;
}

// llama.cpp's own converter stores a matrix whose rows are no whole blocks as F16.
const BlockFormat& format_for(const std::vector<std::int64_t>& shape, TensorType type) {
  if (shape.size() == 1) return format_of(TensorType::f32);
  const BlockFormat& format = format_of(type);
  return static_cast<std::uint64_t>(shape.back()) % format.numbers == 0 ? format : format_of(TensorType::f16);
}

std::vector<Planned> plan_tensors(const ModelConfig& config, TensorType type) {
  std::vector<Planned> plan;
  for (const TensorSpec& tensor : tensor_specs(config)) {
    plan.push_back({tensor.name, tensor_name(tensor.name), tensor.shape, &format_for(tensor.shape, type)});
  }
  if (config.rope.type == RopeType::llama3) {
    plan.push_back({"", rope_factors_name, {config.head_dim / 2}, &format_of(TensorType::f32)});
  }
  std::uint64_t offset = 0;
  for (Planned& tensor : plan) {
    std::uint64_t numbers = 1;
    for (const std::int64_t extent : tensor.shape) numbers *= static_cast<std::uint64_t>(extent);
    tensor.offset = offset;
    tensor.bytes = numbers / tensor.format->numbers * tensor.format->bytes;
    offset += aligned(tensor.bytes);
  }
  return plan;
}

// general.file_type: what most matrices are.
std::int64_t file_type(TensorType type) {
  switch (type) {
    case TensorType::f32:
      return 0;
    case TensorType::f16:
      return 1;
    case TensorType::q8_0:
      return 7;
    case TensorType::bf16:
      return 32;
    default:
      fail("gguf", "tapetune writes F32, F16, BF16 and Q8_0, not {}.", format_of(type).name);
  }
}

std::string header(const Metadata& metadata, const std::vector<Planned>& plan) {
  std::string bytes(magic);
  append<std::uint32_t>(bytes, 3);
  append<std::uint64_t>(bytes, plan.size());
  append<std::uint64_t>(bytes, metadata.count());
  bytes += metadata.bytes();
  for (const Planned& tensor : plan) {
    append_text(bytes, tensor.name);
    append(bytes, static_cast<std::uint32_t>(tensor.shape.size()));
    for (auto extent = tensor.shape.rbegin(); extent != tensor.shape.rend(); ++extent) {
      append(bytes, static_cast<std::uint64_t>(*extent));  // innermost first
    }
    append(bytes, static_cast<std::uint32_t>(tensor.format->type));
    append(bytes, tensor.offset);
  }
  bytes.resize(aligned(bytes.size()), '\0');
  return bytes;
}

// From halves to neighbours: [H * D, ...] with D as (2, D/2) to D as (D/2, 2).
at::Tensor neighbours_from_halves(const at::Tensor& rows, std::int64_t heads) {
  const std::int64_t half = rows.size(0) / heads / 2;
  return rows.reshape({heads, 2, half, -1}).transpose(1, 2).reshape(rows.sizes());
}

[[noreturn]] void refuse_numbers(const Planned& tensor) {
  fail("gguf", "{} has NaN, Inf or values out of range for {}; the model is broken, or export it as bf16 or f32.",
       tensor.source, tensor.format->name);
}

std::span<const std::byte> bytes_of(const at::Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.const_data_ptr()), static_cast<std::size_t>(tensor.nbytes())};
}

// The tensor's numbers as they go into the file.
at::Tensor encoded(const Planned& planned, const at::Tensor& tensor) {
  if (planned.format->type != TensorType::q8_0) {
    const at::ScalarType dtype = planned.format->type == TensorType::f16    ? at::kHalf
                                 : planned.format->type == TensorType::bf16 ? at::kBFloat16
                                                                            : at::kFloat;
    at::Tensor plain = tensor.to(dtype).contiguous();
    if (!at::isfinite(plain).all().item<bool>()) refuse_numbers(planned);
    return plain;
  }
  const BlockFormat& format = *planned.format;
  const at::Tensor wide = tensor.to(at::kFloat).contiguous();
  at::Tensor blocks = at::empty({static_cast<std::int64_t>(planned.bytes)}, at::kByte);
  const std::span<const float> numbers(wide.const_data_ptr<float>(), static_cast<std::size_t>(wide.numel()));
  const std::span<std::byte> bytes(static_cast<std::byte*>(blocks.data_ptr()), planned.bytes);
  std::atomic<bool> finite = true;
  at::parallel_for(0, static_cast<std::int64_t>(planned.bytes / format.bytes), 1024,
                   [&](std::int64_t begin, std::int64_t end) {
                     const auto first = static_cast<std::size_t>(begin), count = static_cast<std::size_t>(end - begin);
                     if (!quantize_q8_0(numbers.subspan(first * format.numbers, count * format.numbers),
                                        bytes.subspan(first * format.bytes, count * format.bytes))) {
                       finite = false;
                     }
                   });
  if (!finite) refuse_numbers(planned);
  return blocks;
}

}  // namespace

void write_gguf(const fs::path& path, const ModelConfig& config,
                const std::function<at::Tensor(const std::string& name)>& load, const ExportOptions& options) {
  Metadata metadata;
  metadata.text("general.architecture", llama_cpp_name(config.architecture));
  metadata.text("general.type", "model");
  if (!options.name.empty()) metadata.text("general.name", options.name);
  metadata.whole("general.file_type", file_type(options.type));
  metadata.whole("general.quantization_version", 2);
  write_settings(metadata, config);
  write_tokenizer(metadata, options.tokenizer, config);

  const std::vector<Planned> plan = plan_tensors(config, options.type);
  const std::string head = header(metadata, plan);
  const std::uint64_t total = head.size() + plan.back().offset + aligned(plan.back().bytes);
  require_writable(path, options.replace);
  require_space(path, total);
  WholeFile file(path, options.replace);
  Progress progress("writing", total, "B");
  file.write(head);
  for (const Planned& planned : plan) {
    at_moment("tensor");
    check_interrupted();
    at::Tensor tensor = planned.source.empty() ? at::tensor(llama3_factors(config.rope, config.head_dim), at::kFloat)
                                               : load(planned.source).to(at::kCPU);
    if (tensor.sizes() != at::IntArrayRef(planned.shape)) {
      fail("gguf", "{}: planned as {}, but given as {}.", planned.source, shape_text(planned.shape),
           shape_text(tensor.sizes()));
    }
    const std::int64_t heads = planned.source.empty() ? 0 : reordered_heads(planned.source, config);
    tensor = encoded(planned, heads == 0 ? tensor : neighbours_from_halves(tensor, heads));
    file.write(bytes_of(tensor));
    file.write(std::string(aligned(planned.bytes) - planned.bytes, '\0'));
    progress.advance(planned.bytes);
  }
  file.commit();
}

}  // namespace tapetune::gguf
