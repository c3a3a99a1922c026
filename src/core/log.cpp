#include "core/log.h"

#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <cstdlib>

#include "core/escape.h"
#include "core/machine.h"

namespace tapetune {

namespace {

// spdlog calls the level below a warning "info".
class LevelName : public spdlog::custom_flag_formatter {
 public:
  void format(const spdlog::details::log_msg& message, const std::tm&, spdlog::memory_buf_t& out) override {
    const spdlog::string_view_t name =
        message.level == spdlog::level::info ? "note" : spdlog::level::to_string_view(message.level);
    out.append(name.data(), name.data() + name.size());
  }
  std::unique_ptr<custom_flag_formatter> clone() const override { return std::make_unique<LevelName>(); }
};

// https://no-color.org
bool wants_no_color() {
  const char* value = std::getenv("NO_COLOR");
  return value != nullptr && *value != '\0';
}

spdlog::logger& logger() {
  static const auto instance = [] {
    auto made = spdlog::stderr_color_mt("tapetune",
                                        wants_no_color() ? spdlog::color_mode::never : spdlog::color_mode::automatic);
    auto formatter = std::make_unique<spdlog::pattern_formatter>();
    formatter->add_flag<LevelName>('*').set_pattern("%^%*%$: %v");
    made->set_formatter(std::move(formatter));
    return made;
  }();
  return *instance;
}

LogFile* log_file = nullptr;

}  // namespace

void set_quiet(bool quiet) { logger().set_level(quiet ? spdlog::level::err : spdlog::level::info); }

bool quiet() { return !logger().should_log(spdlog::level::warn); }

void log_note(const std::string& text) {
  if (log_file != nullptr) log_file->line(text);
  logger().info(printable(text));
}

void log_warning(const std::string& text) {
  if (log_file != nullptr) log_file->line("warning: " + text);
  logger().warn(printable(text));
}

LogFile::LogFile(const std::filesystem::path& path) : file_(std::fopen(path.c_str(), "ab")), before_(log_file) {
  log_file = this;
}

LogFile::~LogFile() {
  log_file = before_;
  if (file_ != nullptr) std::fclose(file_);
}

void LogFile::line(const std::string& text) {
  if (file_ == nullptr) return;
  const std::string line = fmt::format("{} {}\n", utc_time(), printable(text));
  std::fwrite(line.data(), 1, line.size(), file_);
  std::fflush(file_);
}

void log_error(const std::string& text) {
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    logger().error(printable(std::string_view(text).substr(begin, end - begin)));
    begin = end + 1;
  }
}

}  // namespace tapetune
