#include "core/log.h"

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

namespace tapetune {

namespace {

spdlog::logger& logger() {
  static const auto instance = [] {
    auto made = spdlog::stderr_color_mt("tapetune");
    made->set_pattern("%^%l%$: %v");
    return made;
  }();
  return *instance;
}

}  // namespace

void set_log_level(LogLevel level) {
  logger().set_level(level == LogLevel::quiet     ? spdlog::level::err
                     : level == LogLevel::verbose ? spdlog::level::info
                                                  : spdlog::level::warn);
}

void log_line(bool warning, const std::string& text) {
  logger().log(warning ? spdlog::level::warn : spdlog::level::info, text);
}

}  // namespace tapetune
