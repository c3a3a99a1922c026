// How the program ends after an exception: an exit code and a message of one line (a recipe has one for each mistake).
#pragma once

#include <exception>
#include <string>

namespace tapetune::cli {

enum ExitCode { ok = 0, bad_input = 1, bad_usage = 2, resumable = 3 };

struct ExitMessage {
  std::string text;
  ExitCode code;
};

ExitMessage exit_message(const std::exception_ptr& thrown);

// On stderr: what failed as "error: ...", an interruption as it is.
void tell(const ExitMessage& message);

}  // namespace tapetune::cli
