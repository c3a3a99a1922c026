// Products in tiles of registers, for loops that are compiled as simd.h says.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cpu/attention_loops.h"
#include "kernels/cpu/simd.h"

namespace tapetune::kernels::loops {

// Rows that are computed together, at most: room is made for whole tiles.
inline constexpr std::int64_t highest_tile = 12;

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

// Tiles of products for one size of vectors, `count` numbers each. A tile of a product is `tile` x 16 numbers: 6 rows
// of two vectors with AVX2, which are 12 of its 16 registers, the others for a row and a factor; 12 rows of one with
// AVX-512.
template <int count>
struct Tiles {
  using Vector = typename Of<count>::Vector;
  using Bits = typename Of<count>::Bits;
  using Mask = typename Of<count>::Mask;
  static constexpr int parts = lane / count, tile = highest_tile / parts;
  struct Tile {
    Vector c[tile][parts];
  };

  // Heads of at most `count` numbers leave half of two vectors empty, so that their tile is twice as high and half as
  // wide.
  static constexpr int strip = highest_tile;
  struct Strip {
    Vector c[strip][1];
  };
  // Rows that are computed together: what one of them needs exists for all.
  static constexpr std::int64_t unit_of(std::int64_t width) { return width <= count ? strip : tile; }

  static TAPETUNE_INLINE void load(Vector& x, const float* from) {
    x = *reinterpret_cast<const typename Of<count>::Loose*>(from);
  }
  static TAPETUNE_INLINE void store(float* to, const Vector& x) {
    *reinterpret_cast<typename Of<count>::Loose*>(to) = x;
  }

  // 2^x, and 0 below 2^-126: 1 ulp. Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
  static TAPETUNE_INLINE void exp2_inplace(Vector& x) {
    const Mask tiny = x < -126.0F;
    const Vector shifted = x + 12582912.0F;
    const Vector r = x - (shifted - 12582912.0F);
    Vector p = 1.53458124e-4F * r + 1.33999309e-3F;
    p = p * r + 9.61848907e-3F;
    p = p * r + 5.55032864e-2F;
    p = p * r + 2.40226462e-1F;
    p = p * r + 6.93147182e-1F;
    p = p * r + 1.0F;
    x = reinterpret_cast<Vector>((reinterpret_cast<Bits>(p) + (reinterpret_cast<Bits>(shifted) << 23)) &
                                 reinterpret_cast<Bits>(~tiny));
  }

  template <int rows, int columns>
  static TAPETUNE_INLINE void clear(Vector (&c)[rows][columns]) {
#pragma GCC unroll 12
    for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 2
      for (int j = 0; j < columns; ++j) c[i][j] = Vector{};
    }
  }

  template <int rows, int columns>
  static TAPETUNE_INLINE void load(Vector (&c)[rows][columns], const float* from, std::int64_t stride) {
#pragma GCC unroll 12
    for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 2
      for (int j = 0; j < columns; ++j) load(c[i][j], from + i * stride + j * count);
    }
  }

  template <int rows, int columns>
  static TAPETUNE_INLINE void store(const Vector (&c)[rows][columns], float* to, std::int64_t stride) {
#pragma GCC unroll 12
    for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 2
      for (int j = 0; j < columns; ++j) store(to + i * stride + j * count, c[i][j]);
    }
  }

  template <int rows, int columns>
  static TAPETUNE_INLINE void shrink_rows(Vector (&c)[rows][columns], const float* shrink) {
#pragma GCC unroll 12
    for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 2
      for (int j = 0; j < columns; ++j) c[i][j] *= shrink[i];
    }
  }

  // c += a b, with a[i, k] at a + i * row + k * step and b[k, j] at b + k * b_stride + j.
  template <int rows, int columns>
  static TAPETUNE_INLINE void multiply(Vector (&c)[rows][columns], const float* a, std::int64_t row, std::int64_t step,
                                       const float* b, std::int64_t b_stride, std::int64_t terms) {
#pragma GCC unroll 2
    for (std::int64_t k = 0; k < terms; ++k) {
      Vector own[columns];
#pragma GCC unroll 2
      for (int j = 0; j < columns; ++j) load(own[j], b + j * count);
#pragma GCC unroll 12
      for (int i = 0; i < rows; ++i) {
        const float x = a[i * row];
#pragma GCC unroll 2
        for (int j = 0; j < columns; ++j) c[i][j] += x * own[j];
      }
      a += step, b += b_stride;
    }
  }
};

}  // namespace tapetune::kernels::loops
