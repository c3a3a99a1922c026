#include "core/error.h"

#include <algorithm>
#include <system_error>

namespace tapetune {

void throw_error(std::string_view component, const std::string& text) {
  std::string line = fmt::format("[{}] {}", component, text);
  // Parts of the text may come from other libraries or from a file; a message is one line.
  std::replace(line.begin(), line.end(), '\n', ' ');
  throw Error(line);
}

std::string errno_text(int error) { return std::generic_category().message(error); }

}  // namespace tapetune
