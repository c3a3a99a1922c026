// Numbers on the command line, with suffixes and with errors that a person can read.
#pragma once

#include <CLI/CLI.hpp>

#include <cstdint>

namespace tapetune::cli {

// 2000 or 2k; k, M, G and T are decimal.
CLI::Validator whole_number(std::int64_t least);
// From 1 to more than any machine has cores.
CLI::Validator thread_count();
// 1.5e14, 150T or 80GB, not below 0.
CLI::Validator amount();
// 80GB; a number so small that its unit was forgotten is refused.
CLI::Validator bytes();
// A number of tokens, of which "2k" does not say whether it is 2048 or 2000.
CLI::Validator context_length();

}  // namespace tapetune::cli
