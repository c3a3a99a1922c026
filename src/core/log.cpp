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

void set_quiet(bool quiet) { logger().set_level(quiet ? spdlog::level::err : spdlog::level::warn); }

bool quiet() { return !logger().should_log(spdlog::level::warn); }

void log_warning(const std::string& text) { logger().warn(text); }

}  // namespace tapetune
