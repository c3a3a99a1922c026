#include "core/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>

#include "core/log.h"

namespace tapetune {

namespace {

std::string scaled(double value, const std::string& unit) {
  for (const char* prefix : {"", "k", "M", "G", "T"}) {
    if (value < 1000 || *prefix == 'T') return fmt::format("{:.{}f} {}{}", value, *prefix ? 1 : 0, prefix, unit);
    value /= 1000;
  }
  return {};
}

}  // namespace

Progress::Progress(std::string what, std::uint64_t total, std::string unit)
    : what_(std::move(what)),
      unit_(std::move(unit)),
      total_(total),
      terminal_(::isatty(STDERR_FILENO) != 0),
      start_(std::chrono::steady_clock::now()),
      printed_(start_) {}

Progress::~Progress() {
  if (shown_) print(true);
}

void Progress::advance(std::uint64_t amount, std::string note) {
  done_ += amount;
  if (!note.empty()) note_ = std::move(note);
  const auto now = std::chrono::steady_clock::now();
  // Work that ends within a second needs no bar.
  const auto interval = terminal_ ? std::chrono::milliseconds(200) : std::chrono::seconds(10);
  if (quiet() || now - start_ < std::chrono::seconds(1) || now - printed_ < interval) return;
  printed_ = now;
  print(false);
}

void Progress::print(bool last) {
  shown_ = true;
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  const double rate = seconds > 0 ? static_cast<double>(done_) / seconds : 0;
  const double share = total_ > 0 ? static_cast<double>(done_) / static_cast<double>(total_) : 1;
  const double left = rate > 0 ? static_cast<double>(total_ - done_) / rate : 0;
  std::string line = fmt::format("{} {:3.0f}%  {}  {}/s  {:.0f} s left", what_, 100 * share,
                                 scaled(static_cast<double>(done_), unit_), scaled(rate, unit_), left);
  if (!note_.empty()) line += "  " + note_;
  if (terminal_) {
    constexpr int width = 24;
    const int filled = static_cast<int>(share * width);
    line = fmt::format("\r\033[K[{:=<{}}{: <{}}] {}", "", filled, "", width - filled, line);
  }
  fmt::print(stderr, "{}{}", line, terminal_ && !last ? "" : "\n");
  std::fflush(stderr);
}

}  // namespace tapetune
