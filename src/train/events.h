// Scalars for TensorBoard, in its own record format.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string_view>

namespace tapetune {

// Appends to an event file, which a run that goes on after an interruption continues.
class EventFile {
 public:
  explicit EventFile(const std::filesystem::path& path);
  ~EventFile();
  EventFile(const EventFile&) = delete;
  EventFile& operator=(const EventFile&) = delete;

  void scalar(std::string_view tag, std::int64_t step, double value);
  void flush();

 private:
  void record(std::string_view event);
  std::FILE* file_;
  std::filesystem::path path_;
};

}  // namespace tapetune
