#include "run/record.h"

#include <unistd.h>

#include <ATen/Parallel.h>

#include <cmath>

#include "core/error.h"
#include "core/file.h"
#include "core/log.h"
#include "core/machine.h"

namespace tapetune {

namespace fs = std::filesystem;

Metrics::Metrics(const fs::path& path, std::int64_t keep_bytes) : path_(path) {
  std::error_code status;
  const auto size = fs::exists(path, status) ? static_cast<std::int64_t>(fs::file_size(path, status)) : 0;
  if (size < keep_bytes) warn("{}: lines of earlier steps are missing; continuing without them", path.string());
  bytes_ = std::min(size, keep_bytes);
  if (size > bytes_) fs::resize_file(path, static_cast<std::uintmax_t>(bytes_), status);
  file_ = std::fopen(path.c_str(), "ab");
  if (status || file_ == nullptr) fail("train", "{}: cannot be written; check the run folder.", path.string());
}

Metrics::~Metrics() { std::fclose(file_); }

void Metrics::line(Json json) {
  json["time"] = utc_time();
  const std::string text = to_text(json) + "\n";
  if (std::fwrite(text.data(), 1, text.size(), file_) != text.size() || std::fflush(file_) != 0) {
    fail("train", "{}: cannot be written; is the disk full?", path_.string());
  }
  bytes_ += static_cast<std::int64_t>(text.size());
}

std::int64_t Metrics::bytes_on_disk() const {
  if (::fsync(::fileno(file_)) != 0) fail("train", "{}: cannot be written; is the disk full?", path_.string());
  return bytes_;
}

Record::Record(const Recipe& recipe, std::int64_t metrics_bytes, std::int64_t events_bytes)
    : metrics(fs::path(recipe.run) / "metrics.jsonl", metrics_bytes),
      events(fs::path(recipe.run) / fmt::format("events.out.tfevents.{}.tapetune", recipe.seed), events_bytes) {}

void Record::sizes(std::int64_t& metrics_bytes, std::int64_t& events_bytes) const {
  metrics_bytes = metrics.bytes_on_disk();
  events_bytes = events.bytes();
}

Json read_machines(const fs::path& run) {
  const fs::path file = run / "machines.json";
  std::error_code status;
  Json machines = Json::array();
  if (!fs::exists(file, status)) return machines;
  try {
    for (const Json& each : parse_json(read_text(file), "run", file.string())) {
      if (each.is_object()) machines.push_back(each);
    }
  } catch (const Error& error) {
    warn("{} It is ignored.", error.what());
  }
  return machines;
}

void record_machine(const fs::path& run, std::int64_t first_step, int ranks) {
  Json machines = Json::array();
  for (const Json& each : read_machines(run)) {
    if (each.value("first_step", std::int64_t{0}) < first_step) machines.push_back(each);  // others' steps are lost
  }
  machines.push_back(
      {{"first_step", first_step}, {"machine", machine_name()}, {"threads", at::get_num_threads()}, {"ranks", ranks}});
  WholeFile out(run / "machines.json", true);
  out.write(to_text(machines, 2) + "\n");
  out.commit();
}

void SpikeWatch::see(std::int64_t step, double loss) {
  if (count_ >= 20 && loss > mean_ + 6 * std::sqrt(variance_) + 0.1) {
    warn("step {}: loss {:.3f} is far above the mean of {:.3f} before it", step, loss, mean_);
  }
  const double weight = count_ < 20 ? 1.0 / static_cast<double>(count_ + 1) : 0.05, away = loss - mean_;
  mean_ += weight * away;
  variance_ = (1 - weight) * (variance_ + weight * away * away);
  ++count_;
}

}  // namespace tapetune
