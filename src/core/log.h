// Messages for people, on stderr; results go to stdout.
#pragma once

#include <fmt/format.h>

#include <string>
#include <utility>

namespace tapetune {

enum class LogLevel { quiet, normal, verbose };
void set_log_level(LogLevel level);

void log_line(bool warning, const std::string& text);

template <typename... Args>
void note(fmt::format_string<Args...> text, Args&&... args) {
  log_line(false, fmt::format(text, std::forward<Args>(args)...));
}

template <typename... Args>
void warn(fmt::format_string<Args...> text, Args&&... args) {
  log_line(true, fmt::format(text, std::forward<Args>(args)...));
}

}  // namespace tapetune
