// Whether all of a run folder is what the run wrote, and its base model and data are what it was trained on.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "core/json.h"

namespace tapetune {

struct RunCheck {
  enum class State { ok, unchecked, damaged };
  State state = State::ok;
  std::string part;    // a file or folder of the run, "model" or "data"
  std::string detail;  // what was compared, why it was not, or what is wrong
};

// Reads every checkpoint, the result, the metrics, and the base model whole, and samples of the data. Changes nothing.
std::vector<RunCheck> verify_run(const std::filesystem::path& run);

std::string_view check_state_name(RunCheck::State state);
Json run_checks_json(const std::vector<RunCheck>& checks);

}  // namespace tapetune
