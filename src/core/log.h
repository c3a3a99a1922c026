// Warnings for people, on stderr; results go to stdout.
#pragma once

#include <fmt/format.h>

#include <string>
#include <utility>

namespace tapetune {

// Neither warnings nor progress; errors are always shown.
void set_quiet(bool quiet);
bool quiet();

void log_warning(const std::string& text);

template <typename... Args>
void warn(fmt::format_string<Args...> text, Args&&... args) {
  log_warning(fmt::format(text, std::forward<Args>(args)...));
}

}  // namespace tapetune
