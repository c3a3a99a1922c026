#include "kernels/cpu/loops.h"

#include <bit>
#include <cmath>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
#define TAPETUNE_SIMD __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define TAPETUNE_SIMD
#endif
#define TAPETUNE_INLINE inline __attribute__((always_inline))

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
  const std::int64_t in = p.in;
  std::int64_t o = begin;
  // Four sums in flight hide the latency of an addition.
  for (; o + output_block <= end; o += output_block) {
    const W *w0 = weight + o * in, *w1 = w0 + in, *w2 = w1 + in, *w3 = w2 + in;
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
      y[0] = a0, y[1] = a1, y[2] = a2, y[3] = a3;
      if (p.bias != nullptr) {
        for (std::int64_t j = 0; j < output_block; ++j) y[j] += p.bias[o + j];
      }
    }
  }
  for (; o < end; ++o) {
    for (std::int64_t r = 0; r < p.rows; ++r) {
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (std::int64_t i = 0; i < in; ++i) sum += p.x[r * in + i] * widen(weight[o * in + i]);
      p.y[r * p.out + o] = sum + (p.bias != nullptr ? p.bias[o] : 0.0F);
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

TAPETUNE_SIMD void rotate(float* x, const float* cos, const float* sin, std::int64_t half) {
#pragma omp simd
  for (std::int64_t i = 0; i < half; ++i) {
    const float a = x[i], b = x[half + i];
    x[i] = a * cos[i] - b * sin[i];
    x[half + i] = b * cos[i] + a * sin[i];
  }
}

TAPETUNE_SIMD void silu_mul(float* gate, const float* up, std::int64_t count) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) gate[i] = gate[i] / (1.0F + fast_exp(-gate[i])) * up[i];
}

TAPETUNE_SIMD void matvec_f32(const Product& p, const float* weight, std::int64_t begin, std::int64_t end) {
  matvec(p, weight, begin, end);
}

TAPETUNE_SIMD void matvec_bf16(const Product& p, const std::uint16_t* weight, std::int64_t begin, std::int64_t end) {
  matvec(p, weight, begin, end);
}

TAPETUNE_SIMD void attend(const float* q, const float* k, const float* v, float* out, float* scores,
                          std::int64_t length, std::int64_t width, float scale) {
  float largest = -INFINITY;
  for (std::int64_t t = 0; t < length; ++t) {
    const float* kt = k + t * width;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (std::int64_t i = 0; i < width; ++i) sum += q[i] * kt[i];
    scores[t] = sum * scale;
    largest = scores[t] > largest ? scores[t] : largest;
  }
  float total = 0;
#pragma omp simd reduction(+ : total)
  for (std::int64_t t = 0; t < length; ++t) {
    scores[t] = fast_exp(scores[t] - largest);
    total += scores[t];
  }
  for (std::int64_t i = 0; i < width; ++i) out[i] = 0;
  for (std::int64_t t = 0; t < length; ++t) {
    const float* vt = v + t * width;
    const float weight = scores[t] / total;
#pragma omp simd
    for (std::int64_t i = 0; i < width; ++i) out[i] += weight * vt[i];
  }
}

}  // namespace tapetune::kernels::loops
