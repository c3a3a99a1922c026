// What a run records while it trains: metrics.jsonl, TensorBoard's event file, and where it trains.
#pragma once

#include <cstdint>
#include <cstdio>
#include <filesystem>

#include "core/json.h"
#include "recipe/recipe.h"
#include "run/events.h"

namespace tapetune {

// metrics.jsonl: one line per step. Lines that an interrupted run wrote after its last checkpoint are removed first.
class Metrics {
 public:
  Metrics(const std::filesystem::path& path, std::int64_t keep_bytes);
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  void line(Json json);  // to which the time is added
  // A checkpoint that survives a loss of power must not count on lines that did not.
  std::int64_t bytes_on_disk() const;

 private:
  std::filesystem::path path_;
  std::FILE* file_ = nullptr;
  std::int64_t bytes_ = 0;
};

struct Record {
  Metrics metrics;
  EventFile events;
  Record(const Recipe& recipe, std::int64_t metrics_bytes, std::int64_t events_bytes);
  void sizes(std::int64_t& metrics_bytes, std::int64_t& events_bytes) const;
};

// machines.json: on which machines the run trained, an object for each process whose steps count, with its first step,
// machine, threads and ranks.
void record_machine(const std::filesystem::path& run, std::int64_t first_step, int ranks);
// Empty for a run of an earlier version, and where the file is damaged: nothing depends on it.
Json read_machines(const std::filesystem::path& run);

// Warns of a loss that is far above those before it.
class SpikeWatch {
 public:
  void see(std::int64_t step, double loss);

 private:
  double mean_ = 0, variance_ = 0;
  std::int64_t count_ = 0;
};

}  // namespace tapetune
