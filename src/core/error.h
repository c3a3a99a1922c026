// Errors that a user reads: one line that names the component, the rule, the value and the remedy.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace tapetune {

// Bad input; the program ends with exit code 1.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  Error(std::string_view component, const std::string& text);
  // Without the component, for those who name a place of their own.
  std::string_view text() const { return std::string_view(what()).substr(prefix_); }

 private:
  std::size_t prefix_ = 0;
};

// A signal asked for an end and everything is saved; exit code 3.
class Interrupted : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

[[noreturn]] void throw_error(std::string_view component, const std::string& text);

// fail("checkpoint", "{}: expected {}, but the file has {}.", name, expected, found)
template <typename... Args>
[[noreturn]] void fail(std::string_view component, fmt::format_string<Args...> text, Args&&... args) {
  throw_error(component, fmt::format(text, std::forward<Args>(args)...));
}

// "No space left on device" for an errno value.
std::string errno_text(int error);
// A system call on a file failed: "opening", "writing".
[[noreturn]] void fail_system(const std::string& path, std::string_view doing, int error);

}  // namespace tapetune
