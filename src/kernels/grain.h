// When a loop is worth sharing among threads.
#pragma once

#include <algorithm>
#include <cstdint>

namespace tapetune::kernels {

// The grain size for at::parallel_for where an iteration touches `numbers` of them: starting threads and waiting for
// them costs as much as some ten thousand, and far more while other processes hold the cores.
inline std::int64_t grain_of(std::int64_t numbers) {
  constexpr std::int64_t least = 16384;
  return std::max<std::int64_t>(1, least / std::max<std::int64_t>(1, numbers));
}

}  // namespace tapetune::kernels
