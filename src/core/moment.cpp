#include "core/moment.h"

#include <csignal>
#include <cstdlib>
#include <string>

namespace tapetune {

void at_moment(std::string_view name) {
  static const char* const wanted = std::getenv("TAPETUNE_STOP_AT");
  if (wanted == nullptr) return;
  static int left = [] {
    const std::string text = wanted;
    return std::atoi(text.substr(text.find(':') + 1).c_str());
  }();
  const std::string_view text = wanted;
  if (text.substr(0, text.find(':')) == name && --left == 0) std::raise(SIGSTOP);
}

}  // namespace tapetune
