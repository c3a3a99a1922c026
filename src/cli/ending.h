// How the program ends when something was thrown: one line, but for errors of ours that have several, and an exit code.
#pragma once

#include <exception>
#include <string>

namespace tapetune::cli {

enum ExitCode { ok = 0, bad_input = 1, bad_usage = 2, resumable = 3 };

struct Ending {
  std::string text;
  ExitCode code;
};

Ending ending(const std::exception_ptr& thrown);

}  // namespace tapetune::cli
