// A clock for measuring.
#pragma once

#include <chrono>

namespace tapetune {

// Of the clock that all processes of a machine share and that never jumps.
inline double monotonic_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace tapetune
