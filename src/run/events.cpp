#include "run/events.h"

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>

#include "core/error.h"

namespace tapetune {

namespace {

// CRC-32C (Castagnoli), masked as TFRecord files have it.
std::uint32_t masked_crc(std::string_view data) {
  static const auto table = [] {
    std::array<std::uint32_t, 256> entries{};
    for (std::uint32_t i = 0; i < 256; ++i) {
      std::uint32_t value = i;
      for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1U) != 0 ? 0x82F63B78U : 0U);
      entries[i] = value;
    }
    return entries;
  }();
  std::uint32_t crc = ~0U;
  for (const char c : data) crc = table[(crc ^ static_cast<unsigned char>(c)) & 0xFFU] ^ (crc >> 8);
  crc = ~crc;
  return ((crc >> 15) | (crc << 17)) + 0xA282EAD8U;
}

// The few parts of protocol buffers that an event needs. A key is the field's number and how its value is written.
enum Wire : std::uint32_t { varint = 0, fixed64 = 1, bytes = 2, fixed32 = 5 };

void put_varint(std::string& out, std::uint64_t value) {
  for (; value >= 0x80; value >>= 7) out.push_back(static_cast<char>(value | 0x80));
  out.push_back(static_cast<char>(value));
}

void put_key(std::string& out, std::uint32_t field, Wire wire) { put_varint(out, field << 3 | wire); }

template <typename T>
void put_fixed(std::string& out, T value) {
  static_assert(std::endian::native == std::endian::little);
  char raw[sizeof(T)];
  std::memcpy(raw, &value, sizeof(T));
  out.append(raw, sizeof(T));
}

void put_bytes(std::string& out, std::uint32_t field, std::string_view value) {
  put_key(out, field, bytes);
  put_varint(out, value.size());
  out += value;
}

std::string event_at_now() {
  std::string event;
  put_key(event, 1, fixed64);  // wall_time
  put_fixed(event, std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count());
  return event;
}

}  // namespace

EventFile::EventFile(const std::filesystem::path& path, std::int64_t keep_bytes) : path_(path) {
  namespace fs = std::filesystem;
  std::error_code status;
  const auto size = fs::exists(path, status) ? static_cast<std::int64_t>(fs::file_size(path, status)) : 0;
  bytes_ = std::min(size, keep_bytes);
  if (size > bytes_) fs::resize_file(path, static_cast<std::uintmax_t>(bytes_), status);
  file_ = std::fopen(path.c_str(), "ab");
  if (status || file_ == nullptr) fail("train", "{}: cannot be written; check the run folder.", path.string());
  if (bytes_ > 0) return;
  std::string event = event_at_now();
  put_bytes(event, 3, "brain.Event:2");  // file_version
  record(event);
}

EventFile::~EventFile() { std::fclose(file_); }

void EventFile::scalar(std::string_view tag, std::int64_t step, double value) {
  std::string one;
  put_bytes(one, 1, tag);
  put_key(one, 2, fixed32);  // simple_value
  put_fixed(one, static_cast<float>(value));
  std::string summary;
  put_bytes(summary, 1, one);
  std::string event = event_at_now();
  put_key(event, 2, varint);
  put_varint(event, static_cast<std::uint64_t>(step));
  put_bytes(event, 5, summary);
  record(event);
}

void EventFile::record(std::string_view event) {
  std::string length, out;
  put_fixed(length, static_cast<std::uint64_t>(event.size()));
  out = length;
  put_fixed(out, masked_crc(length));
  out += event;
  put_fixed(out, masked_crc(event));
  if (std::fwrite(out.data(), 1, out.size(), file_) != out.size()) {
    fail("train", "{}: cannot be written: {}.", path_.string(), std::strerror(errno));
  }
  bytes_ += static_cast<std::int64_t>(out.size());
}

void EventFile::flush() {
  if (std::fflush(file_) != 0) fail("train", "{}: cannot be written; is the disk full?", path_.string());
}

}  // namespace tapetune
