// The learning rate of each step.
#pragma once

#include <cstdint>

namespace tapetune {

enum class ScheduleKind { constant, linear, cosine };

struct Schedule {
  ScheduleKind kind = ScheduleKind::constant;
  double peak = 2e-5;
  double least = 0.0;       // where linear and cosine end
  std::int64_t warmup = 0;  // steps until the peak; the first has rate 0, as in transformers
  std::int64_t steps = 1;   // of the whole run

  double rate(std::int64_t step) const;  // from 0 on
};

}  // namespace tapetune
