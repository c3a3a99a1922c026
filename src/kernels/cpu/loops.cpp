#include "kernels/cpu/loops.h"

#include <bit>
#include <cmath>

#include "kernels/cpu/simd.h"

namespace tapetune::kernels::loops {

namespace {

// exp by splitting off the power of two and a polynomial for the rest: 2 ulp, and it vectorises.
TAPETUNE_INLINE float fast_exp(float x) {
  x = x < -87.0F ? -87.0F : x;
  x = x > 88.0F ? 88.0F : x;
  const float n = std::floor(x * 1.44269504F + 0.5F);
  const float r = (x - n * 0.693359375F) + n * 2.12194440e-4F;
  float p = 1.9875691500e-4F;
  p = p * r + 1.3981999507e-3F;
  p = p * r + 8.3334519073e-3F;
  p = p * r + 4.1665795894e-2F;
  p = p * r + 1.6666665459e-1F;
  p = p * r + 5.0000001201e-1F;
  p = p * r * r + r + 1.0F;
  const std::int32_t power = static_cast<std::int32_t>(n) + 127;
  return p * std::bit_cast<float>(power << 23);
}

TAPETUNE_INLINE float widen(float value) { return value; }
TAPETUNE_INLINE float widen(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

template <typename W>
TAPETUNE_INLINE void matvec(const Product& p, const W* weight, std::int64_t begin, std::int64_t end) {
  const std::int64_t in = p.in, apart = (end - begin) / output_block, last = begin + apart * output_block;
  // Four sums in flight hide the latency of an addition. Their rows lie far apart, so that the processor reads ahead in
  // four places at once: a tenth faster than four neighbours, where memory is what a product waits for.
  for (std::int64_t o = begin; o < begin + apart; ++o) {
    const W *w0 = weight + o * in, *w1 = w0 + apart * in, *w2 = w1 + apart * in, *w3 = w2 + apart * in;
    for (std::int64_t r = 0; r < p.rows; ++r) {
      const float* x = p.x + r * in;
      float a0 = 0, a1 = 0, a2 = 0, a3 = 0;
#pragma omp simd reduction(+ : a0, a1, a2, a3)
      for (std::int64_t i = 0; i < in; ++i) {
        a0 += x[i] * widen(w0[i]);
        a1 += x[i] * widen(w1[i]);
        a2 += x[i] * widen(w2[i]);
        a3 += x[i] * widen(w3[i]);
      }
      float* y = p.y + r * p.out + o;
      y[0] = a0, y[apart] = a1, y[2 * apart] = a2, y[3 * apart] = a3;
      if (p.bias != nullptr) {
        for (std::int64_t j = 0; j < output_block; ++j) y[j * apart] += p.bias[o + j * apart];
      }
    }
  }
  for (std::int64_t o = last; o < end; ++o) {
    for (std::int64_t r = 0; r < p.rows; ++r) {
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (std::int64_t i = 0; i < in; ++i) sum += p.x[r * in + i] * widen(weight[o * in + i]);
      p.y[r * p.out + o] = sum + (p.bias != nullptr ? p.bias[o] : 0.0F);
    }
  }
}

// y = from + A x for rows of vectors: y, from [rows, width], A [rows, columns], x [columns, width].
TAPETUNE_INLINE void mix_rows(const float* from, const float* a, const float* x, float* y, std::int64_t rows,
                              std::int64_t columns, std::int64_t width) {
  for (std::int64_t r = 0; r < rows; ++r) {
    float* to = y + r * width;
#pragma omp simd
    for (std::int64_t d = 0; d < width; ++d) to[d] = from[r * width + d];
    for (std::int64_t c = 0; c < columns; ++c) {
      const float weight = a[r * columns + c];
      const float* row = x + c * width;
#pragma omp simd
      for (std::int64_t d = 0; d < width; ++d) to[d] += weight * row[d];
    }
  }
}

// y += A^T x: y [columns, width], A [rows, columns], x [rows, width].
TAPETUNE_INLINE void add_mixed_back(const float* a, const float* x, float* y, std::int64_t rows, std::int64_t columns,
                                    std::int64_t width) {
  for (std::int64_t c = 0; c < columns; ++c) {
    float* to = y + c * width;
    for (std::int64_t r = 0; r < rows; ++r) {
      const float weight = a[r * columns + c];
      const float* row = x + r * width;
#pragma omp simd
      for (std::int64_t d = 0; d < width; ++d) to[d] += weight * row[d];
    }
  }
}

// The products of every row of x with every row of y: [rows, columns].
template <bool add>
TAPETUNE_INLINE void row_products(const float* x, const float* y, float* out, std::int64_t rows, std::int64_t columns,
                                  std::int64_t width) {
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < columns; ++c) {
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (std::int64_t d = 0; d < width; ++d) sum += x[r * width + d] * y[c * width + d];
      out[r * columns + c] = add ? out[r * columns + c] + sum : sum;
    }
  }
}

}  // namespace

TAPETUNE_SIMD void rms_norm(const float* x, const float* weight, float* y, std::int64_t width, float eps) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t i = 0; i < width; ++i) sum += x[i] * x[i];
  const float scale = 1.0F / std::sqrt(sum / static_cast<float>(width) + eps);
#pragma omp simd
  for (std::int64_t i = 0; i < width; ++i) y[i] = weight[i] * (x[i] * scale);
}

TAPETUNE_SIMD void rms_norm_backward(const float* x, const float* weight, const float* dy, float* dx, float* dw,
                                     std::int64_t width, float eps) {
  float squares = 0, along = 0;
#pragma omp simd reduction(+ : squares, along)
  for (std::int64_t i = 0; i < width; ++i) {
    squares += x[i] * x[i];
    along += x[i] * weight[i] * dy[i];
  }
  const float scale = 1.0F / std::sqrt(squares / static_cast<float>(width) + eps);
  const float pull = along * scale * scale * scale / static_cast<float>(width);
#pragma omp simd
  for (std::int64_t i = 0; i < width; ++i) dx[i] = weight[i] * dy[i] * scale - x[i] * pull;
  if (dw == nullptr) return;
#pragma omp simd
  for (std::int64_t i = 0; i < width; ++i) dw[i] += dy[i] * x[i] * scale;
}

TAPETUNE_SIMD void rotate(const float* x, const float* position, float* y, std::int64_t half) {
  const float *cos = position, *sin = position + half;
#pragma omp simd
  for (std::int64_t i = 0; i < half; ++i) {
    const float a = x[i], b = x[half + i];
    y[i] = a * cos[i] - b * sin[i];
    y[half + i] = b * cos[i] + a * sin[i];
  }
}

TAPETUNE_SIMD void rotate_back(const float* dy, const float* position, float* dx, std::int64_t half) {
  const float *cos = position, *sin = position + half;
#pragma omp simd
  for (std::int64_t i = 0; i < half; ++i) {
    const float a = dy[i], b = dy[half + i];
    dx[i] = a * cos[i] + b * sin[i];
    dx[half + i] = b * cos[i] - a * sin[i];
  }
}

TAPETUNE_SIMD void rotate_position(const float* dy, const float* x, float* d_position, std::int64_t half) {
#pragma omp simd
  for (std::int64_t i = 0; i < half; ++i) {
    d_position[i] += dy[i] * x[i] + dy[half + i] * x[half + i];
    d_position[half + i] += dy[half + i] * x[i] - dy[i] * x[half + i];
  }
}

TAPETUNE_SIMD void update_position(const PositionUpdate& u, const float* position, const float* attended,
                                   const float* change, float* out, float* scratch) {
  mix_rows(position, u.mix, attended, scratch, u.channels, u.heads, u.width);
  mix_rows(scratch, change, scratch, out, u.channels, u.channels, u.width);
}

TAPETUNE_SIMD void update_position_backward(const PositionUpdate& u, const float* position, const float* attended,
                                            const float* change, const float* d_out, float* d_position,
                                            float* d_attended, float* d_change, float* d_mix, float* scratch) {
  mix_rows(position, u.mix, attended, scratch, u.channels, u.heads, u.width);  // as in the forward
  row_products<false>(d_out, scratch, d_change, u.channels, u.channels, u.width);
  for (std::int64_t i = 0; i < u.channels * u.width; ++i) d_position[i] = d_out[i];
  add_mixed_back(change, d_out, d_position, u.channels, u.channels, u.width);
  for (std::int64_t i = 0; i < u.heads * u.width; ++i) d_attended[i] = 0;
  add_mixed_back(u.mix, d_position, d_attended, u.channels, u.heads, u.width);
  row_products<true>(d_position, attended, d_mix, u.channels, u.heads, u.width);
}

TAPETUNE_SIMD void silu_mul(const float* gate, const float* up, float* y, std::int64_t count) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) y[i] = gate[i] / (1.0F + fast_exp(-gate[i])) * up[i];
}

TAPETUNE_SIMD void silu_mul_backward(const float* dy, const float* gate, const float* up, float* d_gate, float* d_up,
                                     std::int64_t count) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) {
    const float sigmoid = 1.0F / (1.0F + fast_exp(-gate[i]));
    d_gate[i] = dy[i] * up[i] * sigmoid * (1.0F + gate[i] * (1.0F - sigmoid));
    d_up[i] = dy[i] * gate[i] * sigmoid;
  }
}

TAPETUNE_SIMD double softmax_gradient(float* logits, std::int64_t count, std::int64_t target) {
  if (target < 0) {
    for (std::int64_t i = 0; i < count; ++i) logits[i] = 0;
    return 0;
  }
  const float chosen = logits[target];
  float largest = -INFINITY;
#pragma omp simd reduction(max : largest)
  for (std::int64_t i = 0; i < count; ++i) largest = logits[i] > largest ? logits[i] : largest;
  // In parts: a float that sums a whole vocabulary loses digits, the more the fewer lanes share the sum.
  constexpr std::int64_t part = 4096;
  double total = 0;
  for (std::int64_t begin = 0; begin < count; begin += part) {
    const std::int64_t end = begin + part < count ? begin + part : count;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (std::int64_t i = begin; i < end; ++i) {
      logits[i] = fast_exp(logits[i] - largest);
      sum += logits[i];
    }
    total += static_cast<double>(sum);
  }
  const auto scale = static_cast<float>(1.0 / total);
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) logits[i] *= scale;
  logits[target] -= 1.0F;
  return std::log(total) + (static_cast<double>(largest) - static_cast<double>(chosen));
}

TAPETUNE_SIMD void matvec_f32(const Product& p, const float* weight, std::int64_t begin, std::int64_t end) {
  matvec(p, weight, begin, end);
}

TAPETUNE_SIMD void matvec_bf16(const Product& p, const std::uint16_t* weight, std::int64_t begin, std::int64_t end) {
  matvec(p, weight, begin, end);
}

TAPETUNE_SIMD void row_dots(const float* x, const float* y, float* out, std::int64_t rows, std::int64_t width) {
  for (std::int64_t r = 0; r < rows; ++r) row_products<false>(x + r * width, y + r * width, out + r, 1, 1, width);
}

TAPETUNE_SIMD void attention_weights(const float* q, const float* k, const float* bias, float* weights,
                                     std::int64_t length, std::int64_t width, float scale) {
  matvec({q, 1, width, length, nullptr, weights}, k, 0, length);  // the keys are the matrix
#pragma omp simd
  for (std::int64_t t = 0; t < length; ++t) weights[t] *= scale;
  if (bias != nullptr) {
#pragma omp simd
    for (std::int64_t t = 0; t < length; ++t) weights[t] += bias[t];
  }
  float largest = -INFINITY;
#pragma omp simd reduction(max : largest)
  for (std::int64_t t = 0; t < length; ++t) largest = weights[t] > largest ? weights[t] : largest;
  float total = 0;
#pragma omp simd reduction(+ : total)
  for (std::int64_t t = 0; t < length; ++t) {
    weights[t] = fast_exp(weights[t] - largest);
    total += weights[t];
  }
#pragma omp simd
  for (std::int64_t t = 0; t < length; ++t) weights[t] /= total;
}

TAPETUNE_SIMD void weighted_sum(const float* weights, const float* v, float* out, std::int64_t length,
                                std::int64_t width) {
  for (std::int64_t i = 0; i < width; ++i) out[i] = 0;
  std::int64_t t = 0;
  // Four at a time: the sums come and go a quarter as often.
  for (; t + 4 <= length; t += 4) {
    const float *v0 = v + t * width, *v1 = v0 + width, *v2 = v1 + width, *v3 = v2 + width;
    const float w0 = weights[t], w1 = weights[t + 1], w2 = weights[t + 2], w3 = weights[t + 3];
#pragma omp simd
    for (std::int64_t i = 0; i < width; ++i) out[i] = (((out[i] + w0 * v0[i]) + w1 * v1[i]) + w2 * v2[i]) + w3 * v3[i];
  }
  for (; t < length; ++t) {
#pragma omp simd
    for (std::int64_t i = 0; i < width; ++i) out[i] += weights[t] * v[t * width + i];
  }
}

}  // namespace tapetune::kernels::loops
