// Scalars for TensorBoard, in its own record format.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string_view>

namespace tapetune {

// Appends to an event file. A resumed run keeps what it had at its checkpoint: later steps
// come again, and a record that was cut off would hide all that follow.
class EventFile {
 public:
  EventFile(const std::filesystem::path& path, std::int64_t keep_bytes);
  ~EventFile();
  EventFile(const EventFile&) = delete;
  EventFile& operator=(const EventFile&) = delete;

  void scalar(std::string_view tag, std::int64_t step, double value);
  void flush();
  std::int64_t bytes() const { return bytes_; }

 private:
  void record(std::string_view event);
  std::FILE* file_ = nullptr;
  std::filesystem::path path_;
  std::int64_t bytes_ = 0;
};

}  // namespace tapetune
