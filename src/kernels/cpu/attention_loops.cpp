#include "kernels/cpu/attention_loops.h"

#include <algorithm>
#include <cmath>

#include "kernels/cpu/rows.h"
#include "kernels/cpu/simd.h"

namespace tapetune::kernels::loops {

namespace {

constexpr float ln_2 = 0.693147181F;
constexpr std::int64_t forward_keys = 384;  // scores that a query holds at a time
constexpr std::int64_t score_stride = row_stride(key_block);
constexpr std::int64_t forward_stride = row_stride(forward_keys);
static_assert(key_block % highest_tile == 0 && key_block % lane == 0 && query_block % highest_tile == 0 &&
              forward_keys % lane == 0);

// All of it for one size of vectors, `count` numbers each. A tile of a product is `tile` x 16 numbers: 6 rows of two
// vectors with AVX2, which are 12 of its 16 registers, the others for a row and a factor; 12 rows of one with AVX-512.
template <int count>
struct Loops {
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

  // The start of a tile of scores: zeros, or the bias of row 0, whose own key is `own` keys behind the tile's first.
  template <int rows, int columns>
  static TAPETUNE_INLINE void begin_scores(Vector (&c)[rows][columns], const float* bias, std::int64_t own) {
    if (bias == nullptr) return clear(c);
    load(c, bias - own, -1);
  }

  // Scores of one query to weights relative to the largest so far: `length` numbers, of which those in [hidden, there)
  // are of keys that it sees.
  static TAPETUNE_INLINE void soften(float* scores, std::int64_t hidden, std::int64_t there, std::int64_t length,
                                     float& largest, float& sum, float& shrink) {
    for (std::int64_t i = 0; i < hidden; ++i) scores[i] = -INFINITY;
    for (std::int64_t i = there; i < length; ++i) scores[i] = -INFINITY;
    Vector top, x;
    load(top, scores);
    for (std::int64_t i = count; i < length; i += count) {
      load(x, scores + i);
      top = top > x ? top : x;
    }
    float now = largest;
    for (int j = 0; j < count; ++j) now = top[j] > now ? top[j] : now;
    const float origin = now == -INFINITY ? 0 : now;  // none seen yet: all weights are 0
    Vector total{};
    for (std::int64_t i = 0; i < length; i += count) {
      load(x, scores + i);
      x = x - origin;
      exp2_inplace(x);
      store(scores + i, x);
      total += x;
    }
    x = Vector{} + (largest - origin);
    exp2_inplace(x);
    shrink = x[0];
    float added = 0;
    for (int j = 0; j < count; ++j) added += total[j];
    sum = sum * shrink + added;
    largest = now;
  }

  // Keys [begin, begin + keys) of those that a block of queries sees, and who sees them.
  struct Keys {
    std::int64_t begin, keys, seen, hidden;  // seen, hidden: of row 0, counted from `begin`
  };

  // to = to * shrink + weights values, tile by tile; before the first keys that a row sees `to` holds nothing.
  template <typename T>
  static TAPETUNE_INLINE void mix_by(const float* weights, const float* values, float* to, const float* shrink,
                                     const Keys& part, std::int64_t rows, std::int64_t width) {
    const std::int64_t stride = row_stride(width), unit = unit_of(width);
    for (std::int64_t c = 0; c < width; c += lane) {
      for (std::int64_t r = 0; r < rows; r += unit) {
        const std::int64_t from = first_tile(part.hidden, r), there = visible(part.seen, r + unit - 1, part.keys);
        if (from >= there) continue;
        float* at = to + r * stride + c;
        T t;
        if (first_tile(part.hidden + part.begin, r) >= part.begin) {
          clear(t.c);
        } else {
          load(t.c, at, stride);
          shrink_rows(t.c, shrink + r);
        }
        multiply(t.c, weights + r * forward_stride + from, forward_stride, 1, values + from * stride + c, stride,
                 there - from);
        store(t.c, at, stride);
      }
    }
  }

  static TAPETUNE_INLINE void mix(const float* weights, const float* values, float* to, const float* shrink,
                                  const Keys& part, std::int64_t rows, std::int64_t width) {
    if (unit_of(width) == strip) return mix_by<Strip>(weights, values, to, shrink, part, rows, width);
    mix_by<Tile>(weights, values, to, shrink, part, rows, width);
  }

  static TAPETUNE_INLINE void forward(const Forward& f) {
    const std::int64_t width = f.width, stride = row_stride(width), unit = unit_of(width),
                       rows = round_up(f.rows, unit);
    const std::int64_t all = f.seen + f.rows - 1;
    float* q = f.scratch;                                 // [rows, stride]
    float* values = q + query_block * stride;             // [rows, stride]
    float* extra_values = values + query_block * stride;  // [rows, stride]
    float* scores = extra_values + query_block * stride;  // [rows, forward_stride]
    float* largest = scores + query_block * forward_stride;
    float* sum = largest + query_block;
    float* shrink = sum + query_block;

    // Scores in powers of two: their exponentials are cheaper.
    copy_scaled(f.q, f.q_stride, f.rows, width, f.scale * log2_e, q);
    fill(q + f.rows * stride, (rows - f.rows) * stride, 0);
    fill(largest, rows, -INFINITY);
    fill(sum, rows, 0);
    for (std::int64_t begin = 0; begin < all; begin += forward_keys) {
      const std::int64_t keys = std::min(forward_keys, all - begin), seen = f.seen - begin, hidden = f.hidden - begin;
      for (std::int64_t k = 0; k < keys; k += lane) {
        const float* panel = f.keys + (begin + k) * width;
        for (std::int64_t r = 0; r < rows; r += tile) {
          const std::int64_t of_unit = r / unit * unit;
          if (visible(seen, of_unit + unit - 1, keys) <= k || first_tile(hidden, of_unit) > k) continue;
          Tile t;
          begin_scores(t.c, f.bias, seen + r - 1 - k);
          multiply(t.c, q + r * stride, stride, 1, panel, lane, width);
          store(t.c, scores + r * forward_stride + k, forward_stride);
        }
      }
      for (std::int64_t r = 0; r < rows; ++r) {
        const std::int64_t of_unit = r / unit * unit, from = first_tile(hidden, of_unit);
        const std::int64_t last = visible(seen, of_unit + unit - 1, keys);
        if (from >= last) continue;
        soften(scores + r * forward_stride + from, visible(hidden, r, keys) - from, visible(seen, r, keys) - from,
               round_up(last, lane) - from, largest[r], sum[r], shrink[r]);
      }
      const Keys part{begin, keys, seen, hidden};
      mix(scores, f.values + begin * stride, values, shrink, part, rows, width);
      if (f.extra_values != nullptr) {
        mix(scores, f.extra_values + begin * stride, extra_values, shrink, part, rows, width);
      }
    }
    divide(values, sum, f.out, f.out_stride, f.rows, width);
    if (f.extra_values != nullptr) divide(extra_values, sum, f.extra_output, f.out_stride, f.rows, width);
    for (std::int64_t r = 0; r < f.rows; ++r) f.lse[r] = largest[r] * ln_2 + std::log(sum[r]);
  }

  // to[key] += sum over the rows that see it of scores[row, key] x[row].
  template <typename T>
  static TAPETUNE_INLINE void spread_by(const float* scores, const float* x, float* to, std::int64_t seen,
                                        std::int64_t hidden, std::int64_t rows, std::int64_t keys, std::int64_t width) {
    const std::int64_t stride = row_stride(width), unit = unit_of(width);
    for (std::int64_t k = 0; k < keys; k += unit) {
      const std::int64_t from = std::max<std::int64_t>(0, k + 1 - seen), behind = std::min(rows, k + unit - hidden);
      if (from >= rows) break;
      if (from >= behind) continue;
      for (std::int64_t c = 0; c < width; c += lane) {
        T t;
        float* at = to + k * stride + c;
        load(t.c, at, stride);
        multiply(t.c, scores + from * score_stride + k, 1, score_stride, x + from * stride + c, stride, behind - from);
        store(t.c, at, stride);
      }
    }
  }

  static TAPETUNE_INLINE void spread(const float* scores, const float* x, float* to, std::int64_t seen,
                                     std::int64_t hidden, std::int64_t rows, std::int64_t keys, std::int64_t width) {
    if (unit_of(width) == strip) return spread_by<Strip>(scores, x, to, seen, hidden, rows, keys, width);
    spread_by<Tile>(scores, x, to, seen, hidden, rows, keys, width);
  }

  // to[row] += sum over the keys that it sees of scores[row, key] k[key].
  template <typename T>
  static TAPETUNE_INLINE void gather_by(const float* scores, const float* k, float* to, std::int64_t seen,
                                        std::int64_t hidden, std::int64_t rows, std::int64_t keys, std::int64_t width) {
    const std::int64_t stride = row_stride(width), unit = unit_of(width);
    for (std::int64_t c = 0; c < width; c += lane) {
      for (std::int64_t r = 0; r < rows; r += unit) {
        const std::int64_t from = visible(hidden, r, keys), there = visible(seen, r + unit - 1, keys);
        if (from >= there) continue;
        float* at = to + r * stride + c;
        T t;
        load(t.c, at, stride);
        multiply(t.c, scores + r * score_stride + from, score_stride, 1, k + from * stride + c, stride, there - from);
        store(t.c, at, stride);
      }
    }
  }

  static TAPETUNE_INLINE void gather(const float* scores, const float* k, float* to, std::int64_t seen,
                                     std::int64_t hidden, std::int64_t rows, std::int64_t keys, std::int64_t width) {
    if (unit_of(width) == strip) return gather_by<Strip>(scores, k, to, seen, hidden, rows, keys, width);
    gather_by<Tile>(scores, k, to, seen, hidden, rows, keys, width);
  }

  // The gradients of scores to those of their distances; row 0's own key is key `seen` - 1.
  static TAPETUNE_INLINE void add_by_distance(const float* d_scores, float* d_bias, std::int64_t seen,
                                              std::int64_t hidden, std::int64_t rows, std::int64_t keys) {
    for (std::int64_t r = 0; r < rows; ++r) {
      const float* x = d_scores + r * score_stride;
      float* to = d_bias - (seen + r - 1);
      for (std::int64_t k = visible(hidden, r, keys), last = visible(seen, r, keys); k < last; ++k) to[k] += x[k];
    }
  }

  static TAPETUNE_INLINE void backward(const Backward& b) {
    const std::int64_t width = b.width, stride = row_stride(width), padded = padded_rows(b.queries);
    const bool second = b.d_extra_output.data != nullptr;
    float* q = b.scratch;                                     // [padded, stride]
    float* d_q = q + padded * stride;                         // [padded, stride]
    float* d_values = d_q + padded * stride;                  // [padded, stride]
    float* d_extra_output = d_values + padded * stride;       // [padded, stride]
    float* k_rows = d_extra_output + padded * stride;         // [key_block, stride]
    float* d_k = k_rows + key_block * stride;                 // [key_block, stride]
    float* d_v = d_k + key_block * stride;                    // [key_block, stride]
    float* d_extra_values = d_v + key_block * stride;         // [key_block, stride]
    float* weights = d_extra_values + key_block * stride;     // [query_block, score_stride]
    float* d_scores = weights + query_block * score_stride;   // [query_block, score_stride]
    float* k_panels = d_scores + query_block * score_stride;  // [key_block / lane, width, lane]
    float* v_panels = k_panels + key_block * width;
    float* extra_panels = v_panels + key_block * width;
    float* lse = extra_panels + key_block * width;  // [padded], in powers of two
    float* delta = lse + padded;                    // [padded]: the sum of weights times their gradients

    copy_scaled(b.q.data, b.q.stride, b.queries, width, b.scale * log2_e, q);
    copy_scaled(b.d_values.data, b.d_values.stride, b.queries, width, 1.0F, d_values);
    if (second) copy_scaled(b.d_extra_output.data, b.d_extra_output.stride, b.queries, width, 1.0F, d_extra_output);
    for (float* x : {q, d_values, d_extra_output}) fill(x + b.queries * stride, (padded - b.queries) * stride, 0);
    fill(d_q, padded * stride, 0);
    fill(weights, 2 * query_block * score_stride, 0);
    fill(lse, 2 * padded, 0);
    for (std::int64_t r = 0; r < b.queries; ++r) {
      lse[r] = b.lse[r] * log2_e;
      delta[r] = b.delta.data[r * b.delta.stride];
    }
    Mask places;
    for (int j = 0; j < count; ++j) places[j] = j;

    for (std::int64_t begin = 0; begin < b.keys; begin += key_block) {
      const std::int64_t keys = std::min(key_block, b.keys - begin);
      copy_scaled(b.k.data + begin * b.k.stride, b.k.stride, keys, width, 1.0F, k_rows);
      transpose(b.k.data + begin * b.k.stride, b.k.stride, keys, width, k_panels);
      transpose(b.v.data + begin * b.v.stride, b.v.stride, keys, width, v_panels);
      if (second)
        transpose(b.extra_values.data + begin * b.extra_values.stride, b.extra_values.stride, keys, width,
                  extra_panels);
      fill(d_k, 3 * key_block * stride, 0);

      const std::int64_t behind = std::min(b.queries, begin + keys - 1 + b.reach - b.past);  // the last that sees a key
      for (std::int64_t from = std::max<std::int64_t>(0, begin - b.past); from < behind; from += query_block) {
        const std::int64_t seen = b.past + from + 1 - begin, hidden = seen - b.reach;
        const std::int64_t there = std::min(query_block, behind - from);
        const std::int64_t unit = unit_of(width), rows = round_up(there, unit);
        // Where units of queries and of keys meet askew, `spread` reads keys beyond what a query sees.
        const std::int64_t askew = seen % unit == 1 ? 0 : unit - 1;
        for (std::int64_t k = 0; k < keys; k += lane) {
          for (std::int64_t r = 0; r < rows; r += tile) {
            const std::int64_t of_unit = r / unit * unit;
            if (visible(seen, of_unit + unit - 1 + askew, keys) <= k) continue;
            if (hidden + of_unit - (unit - 1) >= k + lane) continue;
            float* w = weights + r * score_stride + k;
            Tile t;
            begin_scores(t.c, b.bias, seen + r - 1 - k);
            multiply(t.c, q + (from + r) * stride, stride, 1, k_panels + k * width, lane, width);
#pragma GCC unroll 12
            for (int i = 0; i < tile; ++i) {
#pragma GCC unroll 2
              for (int j = 0; j < parts; ++j) {
                Vector& x = t.c[i][j];
                x = x - lse[from + r + i];
                exp2_inplace(x);
              }
            }
            if (visible(seen, r, keys) < k + lane) {  // the first row does not see all
              for (int i = 0; i < tile; ++i) {
                const auto last = static_cast<std::int32_t>(visible(seen, r + i, keys) - k);
                for (int j = 0; j < parts; ++j) {
                  t.c[i][j] = reinterpret_cast<Vector>(reinterpret_cast<Mask>(t.c[i][j]) & (places < last - j * count));
                }
              }
            }
            if (hidden + r + tile - 1 > k) {  // the last row does not see all
              for (int i = 0; i < tile; ++i) {
                const auto unseen = static_cast<std::int32_t>(visible(hidden, r + i, keys) - k);
                for (int j = 0; j < parts; ++j) {
                  t.c[i][j] =
                      reinterpret_cast<Vector>(reinterpret_cast<Mask>(t.c[i][j]) & (places >= unseen - j * count));
                }
              }
            }
            store(t.c, w, score_stride);
            clear(t.c);
            multiply(t.c, d_values + (from + r) * stride, stride, 1, v_panels + k * width, lane, width);
            if (second)
              multiply(t.c, d_extra_output + (from + r) * stride, stride, 1, extra_panels + k * width, lane, width);
#pragma GCC unroll 12
            for (int i = 0; i < tile; ++i) {
#pragma GCC unroll 2
              for (int j = 0; j < parts; ++j) {
                Vector x;
                load(x, w + i * score_stride + j * count);
                t.c[i][j] = x * (t.c[i][j] - delta[from + r + i]);
              }
            }
            store(t.c, d_scores + r * score_stride + k, score_stride);
          }
        }
        gather(d_scores, k_rows, d_q + from * stride, seen, hidden, rows, keys, width);
        spread(weights, d_values + from * stride, d_v, seen, hidden, there, keys, width);
        if (b.d_extra_values != nullptr && second)
          spread(weights, d_extra_output + from * stride, d_extra_values, seen, hidden, there, keys, width);
        spread(d_scores, q + from * stride, d_k, seen, hidden, there, keys, width);
        if (b.d_bias != nullptr) add_by_distance(d_scores, b.d_bias, seen, hidden, there, keys);
      }
      const std::int64_t at = begin * b.gradient_stride;
      write(d_k, ln_2, b.d_k + at, b.gradient_stride, keys, width);
      write(d_v, 1.0F, b.d_v + at, b.gradient_stride, keys, width);
      if (b.d_extra_values != nullptr)
        write(d_extra_values, 1.0F, b.d_extra_values + at, b.gradient_stride, keys, width);
    }
    write(d_q, b.scale, b.d_q, b.gradient_stride, b.queries, width);
  }
};

TAPETUNE_WIDE void forward_wide(const Forward& f) { Loops<16>::forward(f); }
TAPETUNE_NARROW void forward_narrow(const Forward& f) { Loops<8>::forward(f); }
TAPETUNE_WIDE void backward_wide(const Backward& b) { Loops<16>::backward(b); }
TAPETUNE_NARROW void backward_narrow(const Backward& b) { Loops<8>::backward(b); }

}  // namespace

TAPETUNE_SIMD void copy_rows(const float* from, std::int64_t stride, std::int64_t rows, std::int64_t width, float* to) {
  copy_scaled(from, stride, rows, width, 1.0F, to);
}

TAPETUNE_SIMD void copy_panels(const float* from, std::int64_t stride, std::int64_t rows, std::int64_t width,
                               float* to) {
  transpose(from, stride, rows, width, to);
}

std::int64_t forward_scratch(std::int64_t width) { return query_block * (3 * row_stride(width) + forward_stride + 3); }

std::int64_t backward_scratch(std::int64_t queries, std::int64_t width) {
  return padded_rows(queries) * (4 * row_stride(width) + 2) + key_block * (4 * row_stride(width) + 3 * width) +
         2 * query_block * score_stride;
}

void attention_forward(const Forward& f) { has_wide_vectors() ? forward_wide(f) : forward_narrow(f); }

void attention_backward(const Backward& b) { has_wide_vectors() ? backward_wide(b) : backward_narrow(b); }

}  // namespace tapetune::kernels::loops
