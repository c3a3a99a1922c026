#include "gguf/metadata.h"

#include <limits>

#include "core/error.h"

namespace tapetune::gguf {

void append_text(std::string& bytes, std::string_view text) {
  append<std::uint64_t>(bytes, text.size());
  bytes += text;
}

void Metadata::begin(std::string_view key, Kind kind) {
  append_text(bytes_, key);
  append(bytes_, static_cast<std::uint32_t>(kind));
  ++count_;
}

void Metadata::begin_list(std::string_view key, Kind kind, std::uint64_t count) {
  begin(key, Kind::array);
  append(bytes_, static_cast<std::uint32_t>(kind));
  append(bytes_, count);
}

void Metadata::text(std::string_view key, std::string_view value) {
  begin(key, Kind::text);
  append_text(bytes_, value);
}

void Metadata::whole(std::string_view key, std::int64_t value) {
  if (value < 0 || value > std::numeric_limits<std::uint32_t>::max()) {
    fail("gguf", "{} must be a whole number of 32 bits, but is {}.", key, value);
  }
  begin(key, Kind::u32);
  append(bytes_, static_cast<std::uint32_t>(value));
}

void Metadata::number(std::string_view key, double value) {
  begin(key, Kind::f32);
  append(bytes_, static_cast<float>(value));
}

void Metadata::flag(std::string_view key, bool value) {
  begin(key, Kind::boolean);
  append(bytes_, static_cast<std::uint8_t>(value));
}

void Metadata::texts(std::string_view key, const std::vector<std::string>& values) {
  begin_list(key, Kind::text, values.size());
  for (const std::string& value : values) append_text(bytes_, value);
}

void Metadata::numbers(std::string_view key, std::span<const float> values) {
  begin_list(key, Kind::f32, values.size());
  for (const float value : values) append(bytes_, value);
}

void Metadata::wholes(std::string_view key, std::span<const std::int32_t> values) {
  begin_list(key, Kind::i32, values.size());
  for (const std::int32_t value : values) append(bytes_, value);
}

}  // namespace tapetune::gguf
