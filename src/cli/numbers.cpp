#include "cli/numbers.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>

#include "core/amount.h"

namespace tapetune::cli {

CLI::Validator whole_number(std::int64_t least) {
  const auto read = [least](std::string& text) -> std::string {
    constexpr double largest = 9e15;  // what a double holds exactly
    const std::optional<double> value = parse_amount(text);
    if (!value || *value != std::floor(*value) || *value < static_cast<double>(least) || *value > largest) {
      return fmt::format("\"{}\" is not an integer >= {}; k, M, G and T are decimal (2k is 2000)", text, least);
    }
    text = fmt::format("{}", static_cast<std::int64_t>(*value));
    return {};
  };
  return {read, "", ""};
}

CLI::Validator thread_count() {
  const CLI::Validator number = whole_number(1);
  const auto read = [number](std::string& text) -> std::string {
    constexpr int most =
        1024;  // of a system's tens of thousands: OpenMP and others end the program where it has no more
    if (std::string wrong = number(text); !wrong.empty()) return wrong;
    return std::stoll(text) > most ? fmt::format("{} is more than {}; give the number of cores", text, most) : "";
  };
  return {read, "", ""};
}

CLI::Validator amount() {
  const auto read = [](std::string& text) -> std::string {
    const std::optional<double> value = parse_amount(text);
    if (!value) return fmt::format("\"{}\" is not a number; write it as 1.5e14, 150T or 80GB", text);
    if (*value < 0) return fmt::format("{} is negative; give a number >= 0", text);
    text = fmt::format("{}", *value);
    return {};
  };
  return {read, "", ""};
}

CLI::Validator bytes() {
  const CLI::Validator number = amount();
  const auto read = [number](std::string& text) -> std::string {
    const std::string written = text;
    if (std::string wrong = number(text); !wrong.empty()) return wrong;
    constexpr double least = 1e6;
    if (std::stod(text) >= least) return {};
    std::size_t digits = 0;
    const double number_of_gb = std::stod(written, &digits);
    return fmt::format("{} is less than a megabyte; write it with its unit, as {}GB", written,
                       number_of_gb * 1e9 >= least ? written.substr(0, digits) : "80");
  };
  return {read, "", ""};
}

CLI::Validator context_length() {
  const auto read = [](std::string& text) -> std::string {
    std::int64_t value = 0;
    const char* end = text.data() + text.size();
    const auto [rest, error] = std::from_chars(text.data(), end, value);
    if (error == std::errc() && rest == end && value > 0) return {};
    if (error == std::errc() && value > 0 &&
        (std::string_view(rest, end) == "k" || std::string_view(rest, end) == "K")) {
      return fmt::format("{} tokens: {} or {}? write the number", text, value * 1024, value * 1000);
    }
    return fmt::format("\"{}\" is not a number of tokens", text);
  };
  return {read, "", ""};
}

}  // namespace tapetune::cli
