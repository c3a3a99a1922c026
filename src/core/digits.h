// Numbers for people.
#pragma once

#include <fmt/format.h>

#include <concepts>
#include <string>

namespace tapetune {

// 1,234,567; of a count, which is not negative.
template <std::integral Count>
std::string grouped(Count value) {
  return value < 1000 ? fmt::format("{}", value) : fmt::format("{},{:03}", grouped(value / 1000), value % 1000);
}

}  // namespace tapetune
