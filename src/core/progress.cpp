#include "core/progress.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <vector>

#include "core/escape.h"
#include "core/log.h"
#include "core/output.h"

namespace tapetune {

namespace {

std::string scaled(double value, const std::string& unit) {
  for (const char* prefix : {"", "k", "M", "G", "T"}) {
    if (value < 1000 || *prefix == 'T') return fmt::format("{:.{}f} {}{}", value, *prefix ? 1 : 0, prefix, unit);
    value /= 1000;
  }
  return {};
}

// 45 s, 2:05, 1:02:05
std::string duration(double seconds) {
  const auto all = static_cast<std::int64_t>(std::llround(std::min(seconds, 3.6e8)));
  if (all < 100) return fmt::format("{} s", all);
  if (all < 3600) return fmt::format("{}:{:02}", all / 60, all % 60);
  return fmt::format("{}:{:02}:{:02}", all / 3600, all / 60 % 60, all % 60);
}

struct Shown {
  int bar = 0;
  bool what = true, amount = true, rate = true, left = true;
};

std::string line_of(const ProgressState& state, const Shown& shown) {
  const double share = state.total > 0 ? std::clamp(state.done / state.total, 0.0, 1.0) : 1;
  std::vector<std::string> parts{
      fmt::format("{}{:3.0f}%", shown.what ? printable(state.what) + " " : "", std::floor(100 * share))};
  if (shown.amount) parts.push_back(scaled(state.done, state.unit));
  if (shown.rate && state.rate > 0) parts.push_back(scaled(state.rate, state.unit) + "/s");
  if (shown.left && state.rate > 0) {
    parts.push_back(duration(std::max(0.0, state.total - state.done) / state.rate) + " left");
  }
  if (!state.note.empty()) parts.push_back(printable(state.note));
  const std::string text = fmt::format("{}", fmt::join(parts, "  "));
  if (shown.bar == 0) return text;
  const int filled = static_cast<int>(share * shown.bar);
  return fmt::format("[{:=<{}}{: <{}}] {}", "", filled, "", shown.bar - filled, text);
}

// Asked at each redraw, because windows are resized.
int terminal_columns() {
  winsize size{};
  if (::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  const char* columns = std::getenv("COLUMNS");
  const int given = columns != nullptr ? std::atoi(columns) : 0;
  return given > 0 ? given : 80;
}

}  // namespace

std::string progress_bar(const ProgressState& state, int columns) {
  const Shown choices[] = {{24},
                           {12},
                           {12, true, false},
                           {12, true, false, false},
                           {0, true, false, false},
                           {0, true, false, false, false},
                           {0, false, false, false, false}};
  const auto room = static_cast<std::size_t>(std::max(columns - 1, 1));
  std::string line;
  for (const Shown& shown : choices) {
    line = line_of(state, shown);
    if (line.size() <= room) return line;
  }
  return line.substr(0, room);
}

std::string progress_text(const ProgressState& state) { return line_of(state, {}); }

Progress::Progress(std::string what, std::uint64_t total, std::string unit, std::uint64_t already)
    : already_(static_cast<double>(already)),
      terminal_(::isatty(STDERR_FILENO) != 0),
      start_(std::chrono::steady_clock::now()),
      printed_(start_) {
  state_.what = std::move(what);
  state_.unit = std::move(unit);
  state_.total = static_cast<double>(total);
  state_.done = already_;
}

Progress::~Progress() {
  if (shown_) print(true);
}

void Progress::begin(std::string note) {
  state_.note = std::move(note);
  if (terminal_ && !quiet()) print(false);
}

void Progress::advance(std::uint64_t amount, std::string note) {
  state_.done += static_cast<double>(amount);
  if (!note.empty()) state_.note = std::move(note);
  const auto now = std::chrono::steady_clock::now();
  // Work that ends within a second needs no bar.
  const auto interval = terminal_ ? std::chrono::milliseconds(200) : std::chrono::seconds(10);
  if (quiet() || now - start_ < std::chrono::seconds(1) || now - printed_ < interval) return;
  printed_ = now;
  print(false);
}

void Progress::print(bool last) {
  if (last && !terminal_ && printed_done_ == state_.done) return;  // that line is there already
  shown_ = true;
  printed_done_ = state_.done;
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  state_.rate = seconds > 0 ? (state_.done - already_) / seconds : 0;
  const std::string line = terminal_ ? "\r\033[K" + progress_bar(state_, terminal_columns()) : progress_text(state_);
  write_error(line + (terminal_ && !last ? "" : "\n"));
}

}  // namespace tapetune
