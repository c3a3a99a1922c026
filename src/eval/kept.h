// Evaluations that take long: run to the end with progress, and kept in a file so that they can be taken up again.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "core/error.h"
#include "core/json.h"
#include "core/progress.h"
#include "core/signals.h"
#include "model/llama.h"

namespace tapetune {

// What `eval KIND` of the model `who` kept there, or null where the file is not there yet. Fails where it is anything
// else.
Json read_kept(const std::filesystem::path& path, std::string_view kind, std::string_view who);
void write_kept(const std::filesystem::path& path, std::string_view kind, std::string_view who, const Json& state);

[[noreturn]] void fail_damaged();

// A value of what was kept; fails where it is missing or of another type.
template <typename Value>
Value kept_value(const Json& object, const char* key) {
  const auto found = object.is_object() ? object.find(key) : object.end();
  if (!object.is_object() || found == object.end()) fail_damaged();
  try {
    return found->get<Value>();
  } catch (const nlohmann::json::exception&) {
    fail_damaged();
  }
}

// A model is known by what it computes: its weights may have changed under their name.
constexpr double same_model = 1e-5;  // relative; another number of threads moves the last digits of a loss
// The loss of these tokens.
double fingerprint(const Llama& model, const std::vector<std::int64_t>& tokens);
void check_fingerprint(double before, double now);

// Run has step(), done(), total() and state(). Kept now and then, when interrupted, and at the end, unless the file's
// name is empty.
template <typename Run>
void run_kept(Run& run, std::string_view kind, std::string_view unit, const std::filesystem::path& file,
              std::string_view who) {
  using Clock = std::chrono::steady_clock;
  constexpr auto interval = std::chrono::seconds(30);
  Clock::time_point kept = Clock::now();
  const auto keep = [&] {
    if (!file.empty()) write_kept(file, kind, who, run.state());
    kept = Clock::now();
  };
  Progress progress(std::string(kind), static_cast<std::uint64_t>(run.total() - run.done()), std::string(unit));
  try {
    for (std::int64_t before = run.done(); run.step(); before = run.done()) {
      progress.advance(static_cast<std::uint64_t>(run.done() - before));
      check_interrupted();
      if (Clock::now() - kept >= interval) keep();
    }
  } catch (const Interrupted&) {
    if (file.empty()) throw;
    keep();
    throw Interrupted(fmt::format("interrupted; {} of {} {} are in {}, the same command goes on from there", run.done(),
                                  run.total(), unit, file.string()));
  }
  keep();
}

}  // namespace tapetune
