// Numbers for people.
#pragma once

#include <fmt/format.h>

#include <concepts>
#include <string>
#include <string_view>

namespace tapetune {

// 1,234,567; of a count, which is not negative.
template <std::integral Count>
std::string grouped(Count value) {
  return value < 1000 ? fmt::format("{}", value) : fmt::format("{},{:03}", grouped(value / 1000), value % 1000);
}

// "1 step", "2 steps", "1,000 steps".
template <std::integral Count>
std::string counted(Count count, std::string_view thing) {
  return fmt::format("{} {}{}", grouped(count), thing, count == 1 ? "" : "s");
}

// "24 kB", "850 MB", "1.2 GB"
inline std::string bytes_text(double bytes) {
  if (bytes > 0 && bytes < 1e6) return fmt::format("{:.0f} kB", bytes / 1e3);
  return bytes < 1e9 ? fmt::format("{:.0f} MB", bytes / 1e6) : fmt::format("{:.1f} GB", bytes / 1e9);
}

// "45 s", "12 min", "3.5 h", "2.1 days"
inline std::string time_text(double seconds) {
  if (seconds < 120) return fmt::format("{:.3g} s", seconds);
  if (seconds < 7200) return fmt::format("{:.0f} min", seconds / 60);
  return seconds < 172800 ? fmt::format("{:.1f} h", seconds / 3600) : fmt::format("{:.1f} days", seconds / 86400);
}

}  // namespace tapetune
