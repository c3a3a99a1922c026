// The safetensors container: headers only; data stays where it is mapped. Hugging Face's own crate reads and writes
// them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tapetune {

struct TensorEntry {
  std::string name;
  std::string dtype;  // safetensors' word: "F32", "BF16", …
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0;  // bytes from the start of the data
  std::uint64_t end = 0;
};

struct SafetensorsHeader {
  std::uint64_t data_start = 0;      // where in the file the data begins
  std::vector<TensorEntry> tensors;  // in the order of their data
  std::map<std::string, std::string> metadata;
};

// Validates and lists a whole mapped file; `where` names it in errors.
SafetensorsHeader read_safetensors_header(std::span<const std::byte> file, std::string_view where);

// Sorts the entries as safetensors does (wide dtypes first, then by name), sets begin and end, and returns the bytes
// that come before the data.
std::string lay_out_safetensors(std::vector<TensorEntry>& entries, const std::map<std::string, std::string>& metadata);

// Bytes of one element; 0 for a dtype that tapetune does not know.
std::uint64_t dtype_size(std::string_view dtype);

// [2, 3]
std::string shape_text(std::span<const std::int64_t> shape);

}  // namespace tapetune
