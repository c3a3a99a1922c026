// Messages for people, on stderr: "note: ...", "warning: ..." and "error: ..."; results go to stdout. Control
// characters are escaped, because texts quote files; a stderr that cannot be written is no reason to stop.
#pragma once

#include <fmt/format.h>

#include <cstdio>
#include <filesystem>
#include <string>
#include <utility>

namespace tapetune {

// Neither notes, warnings nor progress; errors are always shown.
void set_quiet(bool quiet);
bool quiet();

void log_note(const std::string& text);
void log_warning(const std::string& text);
// The prefix stands before each line, because a recipe has one for each mistake.
void log_error(const std::string& text);

// While it lives, notes and warnings are appended to this file as well, each with the time; also under set_quiet. A
// file that cannot be written is no reason to stop.
class LogFile {
 public:
  explicit LogFile(const std::filesystem::path& path);
  ~LogFile();
  LogFile(const LogFile&) = delete;
  LogFile& operator=(const LogFile&) = delete;

  void line(const std::string& text);  // for the file only

 private:
  std::FILE* file_;
  LogFile* before_;
};

template <typename... Args>
void note(fmt::format_string<Args...> text, Args&&... args) {
  log_note(fmt::format(text, std::forward<Args>(args)...));
}

template <typename... Args>
void warn(fmt::format_string<Args...> text, Args&&... args) {
  log_warning(fmt::format(text, std::forward<Args>(args)...));
}

}  // namespace tapetune
