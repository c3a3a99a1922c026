#include "core/trace.h"

#include <fmt/format.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <vector>

namespace tapetune::trace {

namespace {

struct Event {
  std::string name;
  std::string_view lane;
  double begin, end;
};

std::atomic<bool> recording = false;
std::mutex guard;  // exchanges end on threads of their own
std::vector<Event>& recorded() {
  static std::vector<Event> all;
  return all;
}

}  // namespace

void begin() { recording = true; }
bool on() { return recording; }

double now() {
  return std::chrono::duration<double, std::micro>(std::chrono::system_clock::now().time_since_epoch()).count();
}

void add(std::string name, std::string_view lane, double begin, double end) {
  if (!on()) return;
  const std::lock_guard lock(guard);
  recorded().push_back({std::move(name), lane, begin, end});
}

Span::Span(std::string_view name, std::int64_t number) {
  if (!on()) return;
  name_ = number < 0 ? std::string(name) : fmt::format("{} {}", name, number);
  begin_ = now();
}

Span::~Span() {
  if (!name_.empty()) add(std::move(name_), "compute", begin_, now());
}

Json events(int process) {
  const std::lock_guard lock(guard);
  Json all = Json::array();
  all.push_back(
      {{"ph", "M"}, {"name", "process_name"}, {"pid", process}, {"args", {{"name", fmt::format("rank {}", process)}}}});
  for (const Event& e : recorded()) {
    all.push_back(
        {{"ph", "X"}, {"name", e.name}, {"pid", process}, {"tid", e.lane}, {"ts", e.begin}, {"dur", e.end - e.begin}});
  }
  return all;
}

}  // namespace tapetune::trace
