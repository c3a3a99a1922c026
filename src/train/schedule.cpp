#include "train/schedule.h"

#include <algorithm>
#include <cmath>

namespace tapetune {

double Schedule::rate(std::int64_t step) const {
  if (step < warmup) return peak * static_cast<double>(step) / static_cast<double>(warmup);
  if (kind == ScheduleKind::constant) return peak;
  const auto left = static_cast<double>(std::max<std::int64_t>(1, steps - warmup));
  const double done = std::min(1.0, static_cast<double>(step - warmup) / left);
  const double share = kind == ScheduleKind::linear ? 1 - done : 0.5 * (1 + std::cos(M_PI * done));
  return least + (peak - least) * share;
}

}  // namespace tapetune
