#include "checkpoint/writer.h"

#include <charconv>

#include "checkpoint/dtype.h"
#include "core/error.h"
#include "core/file.h"
#include "core/json.h"
#include "core/progress.h"
#include "core/signals.h"
#include "hf/safetensors.h"

namespace tapetune {
namespace fs = std::filesystem;

namespace {

const std::map<std::string, std::string> metadata{{"format", "pt"}};

std::uint64_t planned_bytes(const PlannedTensor& tensor) {
  std::uint64_t bytes = c10::elementSize(tensor.dtype);
  for (const std::int64_t extent : tensor.shape) bytes *= static_cast<std::uint64_t>(extent);
  return bytes;
}

// Fills a shard until the next tensor would pass the limit; a tensor larger than the limit gets one of its own.
std::vector<std::vector<PlannedTensor>> split(const std::vector<PlannedTensor>& plan, std::uint64_t limit) {
  std::vector<std::vector<PlannedTensor>> shards;
  std::uint64_t filled = 0;
  for (const PlannedTensor& tensor : plan) {
    const std::uint64_t bytes = planned_bytes(tensor);
    if (shards.empty() || filled + bytes > limit) {
      shards.emplace_back();
      filled = 0;
    }
    shards.back().push_back(tensor);
    filled += bytes;
  }
  return shards;
}

std::span<const std::byte> bytes_of(const at::Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.const_data_ptr()), static_cast<std::size_t>(tensor.nbytes())};
}

at::Tensor as_planned(const PlannedTensor& planned, const at::Tensor& given) {
  if (given.sizes() != at::IntArrayRef(planned.shape)) {
    fail("writer", "{}: planned as {}, but given as {}.", planned.name, shape_text(planned.shape),
         shape_text(given.sizes()));
  }
  return given.to(at::kCPU).to(planned.dtype).contiguous();
}

void carry_files(const fs::path& from, const fs::path& to) {
  // The files beside the weights that transformers, vLLM and llama.cpp look for.
  static constexpr const char* names[] = {"generation_config.json",  "tokenizer.json",    "tokenizer.model",
                                          "tokenizer_config.json",   "vocab.json",        "merges.txt",
                                          "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"};
  std::error_code status;
  for (const char* name : names) {
    if (!fs::exists(from / name, status)) continue;
    OutputFile out(to / name);
    out.write(read_text(from / name));
    out.finish();
  }
}

}  // namespace

void write_checkpoint(const fs::path& folder, const ModelConfig& config, const std::vector<PlannedTensor>& plan,
                      const std::function<at::Tensor(const std::string& name)>& load, const WriteOptions& options) {
  if (plan.empty()) fail("writer", "{}: there are no tensors to write.", folder.string());
  if (options.shard_bytes == 0) fail("writer", "the shard size must be greater than 0.");
  const std::vector<std::vector<PlannedTensor>> shards = split(plan, options.shard_bytes);
  std::uint64_t total = 0, parameters = 0;
  std::map<std::string, std::uint64_t> by_dtype;
  for (const PlannedTensor& tensor : plan) {
    total += planned_bytes(tensor);
    parameters += planned_bytes(tensor) / c10::elementSize(tensor.dtype);
    by_dtype[dtype_to_transformers(tensor.dtype)] += planned_bytes(tensor);
  }

  StagedFolder staged(folder, options.replace);
  require_space(staged.path(), total);
  Progress progress("writing", total, "B");
  std::map<std::string, std::string> weight_map;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const std::string name = shards.size() == 1 ? "model.safetensors"
                                                : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size());
    std::vector<TensorEntry> entries;
    std::map<std::string, const PlannedTensor*> planned;
    for (const PlannedTensor& tensor : shards[i]) {
      entries.push_back({tensor.name, dtype_to_safetensors(tensor.dtype), tensor.shape});
      planned[tensor.name] = &tensor;
      weight_map[tensor.name] = name;
    }
    OutputFile out(staged.path() / name);
    out.write(lay_out_safetensors(entries, metadata));
    for (const TensorEntry& entry : entries) {
      check_interrupted();
      out.write(bytes_of(as_planned(*planned[entry.name], load(entry.name))));
      progress.advance(entry.end - entry.begin);
    }
    out.finish();
  }

  const auto write_text = [&](const char* name, const std::string& text) {
    OutputFile out(staged.path() / name);
    out.write(text);
    out.finish();
  };
  if (shards.size() > 1) {
    Json index;
    index["metadata"] = {{"total_parameters", parameters}, {"total_size", total}};
    index["weight_map"] = weight_map;
    write_text("model.safetensors.index.json", index.dump(2) + "\n");
  }
  const auto most = std::max_element(by_dtype.begin(), by_dtype.end(),
                                     [](const auto& a, const auto& b) { return a.second < b.second; });
  write_text("config.json", write_config(config, most->first));
  if (!options.carry_from.empty()) carry_files(options.carry_from, staged.path());
  check_interrupted();
  staged.commit();
}

void save_safetensors(const fs::path& path, const std::map<std::string, at::Tensor>& tensors, bool replace,
                      const std::map<std::string, std::string>& file_metadata) {
  std::vector<TensorEntry> entries;
  entries.reserve(tensors.size());
  for (const auto& [name, tensor] : tensors) {
    entries.push_back({name, dtype_to_safetensors(tensor.scalar_type()), tensor.sizes().vec()});
  }
  const std::string head = lay_out_safetensors(entries, file_metadata);
  WholeFile file(path, replace);
  file.write(head);
  for (const TensorEntry& entry : entries) file.write(bytes_of(tensors.at(entry.name).to(at::kCPU).contiguous()));
  file.commit();
}

std::uint64_t parse_size(std::string_view text) {
  std::uint64_t value = 0;
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const std::string_view unit(rest, static_cast<std::size_t>(text.data() + text.size() - rest));
  const std::uint64_t scale = unit.empty() || unit == "B" ? 1
                              : unit == "KB"              ? 1'000
                              : unit == "MB"              ? 1'000'000
                              : unit == "GB"              ? 1'000'000'000
                              : unit == "TB"              ? 1'000'000'000'000
                                                          : 0;
  if (error != std::errc() || value == 0 || scale == 0 || value > UINT64_MAX / scale) {
    fail("size", "\"{}\" is not a size; give a number with B, KB, MB, GB or TB, for example 5GB.", text);
  }
  return value * scale;
}

}  // namespace tapetune
