#include "hf/safetensors.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>

#include "core/error.h"
#include "hf_bridge.h"
#include "rust/cxx.h"

namespace tapetune {

namespace {

struct DtypeSize {
  std::string_view name;
  std::uint64_t bytes;
};

// In safetensors' own order, which decides the order of tensors in a file.
constexpr std::array<DtypeSize, 13> known_dtypes{{{"BOOL", 1},
                                                  {"U8", 1},
                                                  {"I8", 1},
                                                  {"I16", 2},
                                                  {"U16", 2},
                                                  {"F16", 2},
                                                  {"BF16", 2},
                                                  {"I32", 4},
                                                  {"U32", 4},
                                                  {"F32", 4},
                                                  {"F64", 8},
                                                  {"I64", 8},
                                                  {"U64", 8}}};

std::size_t dtype_rank(std::string_view dtype) {
  const auto found = std::find_if(known_dtypes.begin(), known_dtypes.end(),
                                  [&](const DtypeSize& known) { return known.name == dtype; });
  return static_cast<std::size_t>(found - known_dtypes.begin());
}

}  // namespace

std::uint64_t dtype_size(std::string_view dtype) {
  const std::size_t rank = dtype_rank(dtype);
  return rank < known_dtypes.size() ? known_dtypes[rank].bytes : 0;
}

std::string shape_text(std::span<const std::int64_t> shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

SafetensorsHeader read_safetensors_header(std::span<const std::byte> file, std::string_view where) {
  try {
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(file.data());
    const hf::bridge::Header raw = hf::bridge::read_header(rust::Slice<const std::uint8_t>(bytes, file.size()));
    SafetensorsHeader header;
    header.data_start = raw.data_start;
    header.tensors.reserve(raw.tensors.size());
    for (const auto& entry : raw.tensors) {
      header.tensors.push_back({std::string(entry.name),
                                std::string(entry.dtype),
                                {entry.shape.begin(), entry.shape.end()},
                                entry.begin,
                                entry.end});
    }
    for (const auto& pair : raw.metadata) header.metadata.emplace(std::string(pair.key), std::string(pair.value));
    return header;
  } catch (const rust::Error& error) {
    fail("checkpoint", "{}: is not a whole safetensors file ({}); download or copy it again.", where, error.what());
  }
}

std::string lay_out_safetensors(std::vector<TensorEntry>& entries, const std::map<std::string, std::string>& metadata) {
  std::sort(entries.begin(), entries.end(), [](const TensorEntry& a, const TensorEntry& b) {
    const auto rank_a = dtype_rank(a.dtype), rank_b = dtype_rank(b.dtype);
    return rank_a != rank_b ? rank_a > rank_b : a.name < b.name;
  });
  std::uint64_t offset = 0;
  std::vector<hf::bridge::Entry> raw;
  raw.reserve(entries.size());
  for (TensorEntry& entry : entries) {
    std::uint64_t bytes = dtype_size(entry.dtype);
    rust::Vec<std::uint64_t> shape;
    for (const std::int64_t extent : entry.shape) {
      bytes *= static_cast<std::uint64_t>(extent);
      shape.push_back(static_cast<std::uint64_t>(extent));
    }
    entry.begin = offset;
    entry.end = offset += bytes;
    raw.push_back({rust::String(entry.name), rust::String(entry.dtype), std::move(shape), entry.begin, entry.end});
  }
  std::vector<hf::bridge::KeyValue> pairs;
  pairs.reserve(metadata.size());
  for (const auto& [key, value] : metadata) pairs.push_back({rust::String(key), rust::String(value)});
  try {
    const rust::Vec<std::uint8_t> bytes =
        hf::bridge::write_header({raw.data(), raw.size()}, {pairs.data(), pairs.size()});
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  } catch (const rust::Error& error) {
    fail("checkpoint", "these tensors cannot be written as safetensors: {}.", error.what());
  }
}

}  // namespace tapetune
