#include "core/amount.h"

#include <charconv>
#include <cmath>

namespace tapetune {

std::optional<double> parse_amount(std::string_view text) {
  double value = 0;
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc()) return std::nullopt;
  std::string_view unit(rest, static_cast<std::size_t>(text.data() + text.size() - rest));
  if (unit.ends_with('B')) unit.remove_suffix(1);
  const double scale = unit.empty()                 ? 1
                       : unit == "k" || unit == "K" ? 1e3
                       : unit == "M"                ? 1e6
                       : unit == "G"                ? 1e9
                       : unit == "T"                ? 1e12
                                                    : NAN;
  const double amount = value * scale;
  return std::isfinite(amount) ? std::optional(amount) : std::nullopt;
}

}  // namespace tapetune
