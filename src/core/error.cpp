#include "core/error.h"

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace tapetune {

namespace {

// Parts of the text may come from other libraries or from a file; a message is one line.
std::string message_line(std::string_view component, const std::string& text) {
  std::string line = fmt::format("[{}] {}", component, text);
  std::replace(line.begin(), line.end(), '\n', ' ');
  return line;
}

}  // namespace

Error::Error(std::string_view component, const std::string& text)
    : std::runtime_error(message_line(component, text)), prefix_(component.size() + 3) {}

void throw_error(std::string_view component, const std::string& text) { throw Error(component, text); }

std::string errno_text(int error) { return std::generic_category().message(error); }

void fail_system(const std::string& path, std::string_view doing, int error) {
  const char* remedy = error == ENOSPC || error == EDQUOT ? "free some space or choose another disk"
                       : error == EACCES || error == EPERM || error == EROFS
                           ? "check the permissions or choose another folder"
                       : error == ENOMEM ? "there is not enough memory (or address space: ulimit -v); close other "
                                           "programs, or use a machine with more (tapetune plan tells what a "
                                           "recipe needs)"
                       : error == EMFILE || error == ENFILE ? "too many files are open; raise the limit (ulimit -n)"
                       : error == EFBIG ? "raise the limit on file sizes (ulimit -f), or choose a file system that "
                                          "allows larger files"
                                        : "check the path";
  fail("file", "{}: {} failed: {}; {}.", path, doing, errno_text(error), remedy);
}

}  // namespace tapetune
