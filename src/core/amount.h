// Numbers as people write them.
#pragma once

#include <optional>
#include <string_view>

namespace tapetune {

// "1500", "1.5e14", "2k", "80G", "80GB": k, M, G and T are decimal, a B behind them changes nothing. None where it is
// no finite number.
std::optional<double> parse_amount(std::string_view text);

}  // namespace tapetune
