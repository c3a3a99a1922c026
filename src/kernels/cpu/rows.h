// Rows of numbers, for attention_loops.cpp: copied, transposed into panels, scaled, and which of them are seen. All of
// it becomes part of the code for each instruction set.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cpu/attention_loops.h"
#include "kernels/cpu/simd.h"

namespace tapetune::kernels::loops {

constexpr std::int64_t highest_tile = 12;  // rows that are computed together, at most: room is made for whole tiles

TAPETUNE_INLINE std::int64_t round_up(std::int64_t n, std::int64_t unit) { return (n + unit - 1) / unit * unit; }

// Vectors go by reference only: by value they would have a different ABI for each instruction set.
template <int count>
struct Of;
template <>
struct Of<8> {
  using Vector = float __attribute__((vector_size(32)));
  using Loose = float __attribute__((vector_size(32), aligned(4), may_alias));
  using Bits = std::uint32_t __attribute__((vector_size(32)));
  using Mask = std::int32_t __attribute__((vector_size(32)));  // what a comparison gives: 0 or -1
};
template <>
struct Of<16> {
  using Vector = float __attribute__((vector_size(64)));
  using Loose = float __attribute__((vector_size(64), aligned(4), may_alias));
  using Bits = std::uint32_t __attribute__((vector_size(64)));
  using Mask = std::int32_t __attribute__((vector_size(64)));
};

TAPETUNE_INLINE void copy_scaled(const float* from, std::int64_t stride, std::int64_t rows, std::int64_t width,
                                 float scale, float* to) {
  const std::int64_t to_stride = row_stride(width);
  for (std::int64_t r = 0; r < rows; ++r) {
    const float* x = from + r * stride;
    float* y = to + r * to_stride;
    for (std::int64_t i = 0; i < width; ++i) y[i] = x[i] * scale;
    for (std::int64_t i = width; i < to_stride; ++i) y[i] = 0;
  }
}

TAPETUNE_INLINE void fill(float* to, std::int64_t count, float value) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = value;
}

TAPETUNE_INLINE void transpose(const float* from, std::int64_t stride, std::int64_t rows, std::int64_t width,
                               float* to) {
  constexpr int half = 8;
  for (std::int64_t r = 0; r < rows; r += half) {
    float* at = to + r / lane * lane * width + r % lane;
    const float* x = from + r * stride;
    const std::int64_t there = std::min<std::int64_t>(half, rows - r);
    for (std::int64_t i = 0; i < width && there == half; ++i, ++x) {
      const Of<half>::Vector column = {x[0],          x[stride],     x[2 * stride], x[3 * stride],
                                       x[4 * stride], x[5 * stride], x[6 * stride], x[7 * stride]};
      *reinterpret_cast<Of<half>::Loose*>(at + i * lane) = column;
    }
    for (std::int64_t i = 0; i < width && there < half; ++i, ++x) {
      for (std::int64_t j = 0; j < half; ++j) at[i * lane + j] = j < there ? x[j * stride] : 0;
    }
  }
  if (const std::int64_t end = round_up(rows, half); end % lane != 0) {
    float* at = to + end / lane * lane * width + half;
    for (std::int64_t i = 0; i < width; ++i) fill(at + i * lane, half, 0);
  }
}

// How many of `keys` keys the row sees, where row 0 sees `seen`; with `hidden` for `seen`: how many it does not see.
TAPETUNE_INLINE std::int64_t visible(std::int64_t seen, std::int64_t row, std::int64_t keys) {
  return std::clamp<std::int64_t>(seen + row, 0, keys);
}

// The first key in whole tiles that a unit of rows sees, where row 0 does not see `hidden`.
TAPETUNE_INLINE std::int64_t first_tile(std::int64_t hidden, std::int64_t row) {
  return std::max<std::int64_t>(0, hidden + row) / lane * lane;
}

TAPETUNE_INLINE void divide(const float* from, const float* sum, float* to, std::int64_t stride, std::int64_t rows,
                            std::int64_t width) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const float factor = 1.0F / sum[r];
    const float* x = from + r * row_stride(width);
    for (std::int64_t i = 0; i < width; ++i) to[r * stride + i] = x[i] * factor;
  }
}

// Room for whole units of queries, wherever the first begins.
TAPETUNE_INLINE std::int64_t padded_rows(std::int64_t queries) {
  return round_up(queries, highest_tile) + highest_tile;
}

TAPETUNE_INLINE void write(const float* from, float scale, float* to, std::int64_t to_stride, std::int64_t rows,
                           std::int64_t width) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const float* x = from + r * row_stride(width);
    for (std::int64_t i = 0; i < width; ++i) to[r * to_stride + i] = x[i] * scale;
  }
}

}  // namespace tapetune::kernels::loops
