// GGUF metadata being written: keys and values one after the other, as they go into the file.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "gguf/format.h"

namespace tapetune::gguf {

// Numbers as they lie in memory: tapetune runs on little-endian machines only.
template <typename T>
void append(std::string& bytes, T value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
}

void append_text(std::string& bytes, std::string_view text);  // its length, then itself

class Metadata {
 public:
  void text(std::string_view key, std::string_view value);
  void whole(std::string_view key, std::int64_t value);  // as u32
  void number(std::string_view key, double value);       // as f32
  void flag(std::string_view key, bool value);
  void texts(std::string_view key, const std::vector<std::string>& values);
  void numbers(std::string_view key, std::span<const float> values);
  void wholes(std::string_view key, std::span<const std::int32_t> values);

  std::uint64_t count() const { return count_; }
  const std::string& bytes() const { return bytes_; }

 private:
  void begin(std::string_view key, Kind kind);
  void begin_list(std::string_view key, Kind kind, std::uint64_t count);

  std::uint64_t count_ = 0;
  std::string bytes_;
};

}  // namespace tapetune::gguf
