// Where the time of a process goes, as spans that chrome://tracing and Perfetto show. Nothing is kept until begin().
#pragma once

#include <string>
#include <string_view>

#include "core/json.h"

namespace tapetune::trace {

void begin();
bool on();

double now();  // microseconds since the epoch: the clock that processes of one machine share
// lane: what may overlap with others, "compute" or "exchange".
void add(std::string name, std::string_view lane, double begin, double end);

// The time from its making to its end, on the lane "compute".
class Span {
 public:
  explicit Span(std::string_view name, std::int64_t number = -1);
  ~Span();
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

 private:
  std::string name_;
  double begin_ = 0;
};

// All spans so far in Chrome's format, as process `process`.
Json events(int process);

}  // namespace tapetune::trace
