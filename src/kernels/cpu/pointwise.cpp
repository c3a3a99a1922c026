#include "kernels/pointwise.h"

#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>

#include "kernels/cpu/simd.h"

namespace tapetune::kernels {

namespace {

constexpr std::int64_t grain = 16384;  // elements a thread should get at least

TAPETUNE_SIMD void rms_norm_row(const float* x, const float* weight, float* y, std::int64_t width, float eps) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t i = 0; i < width; ++i) sum += x[i] * x[i];
  const float scale = 1.0F / std::sqrt(sum / static_cast<float>(width) + eps);
#pragma omp simd
  for (std::int64_t i = 0; i < width; ++i) y[i] = weight[i] * (x[i] * scale);
}

TAPETUNE_SIMD void rotate_row(float* x, const float* cos, const float* sin, std::int64_t half) {
#pragma omp simd
  for (std::int64_t i = 0; i < half; ++i) {
    const float a = x[i], b = x[half + i];
    x[i] = a * cos[i] - b * sin[i];
    x[half + i] = b * cos[i] + a * sin[i];
  }
}

// exp by splitting off the power of two and a polynomial for the rest: 2 ulp, and the compiler vectorises it.
inline float fast_exp(float x) {
  x = std::min(std::max(x, -87.0F), 88.0F);
  const float n = std::floor(x * 1.44269504F + 0.5F);
  const float r = (x - n * 0.693359375F) + n * 2.12194440e-4F;
  float p = 1.9875691500e-4F;
  p = p * r + 1.3981999507e-3F;
  p = p * r + 8.3334519073e-3F;
  p = p * r + 4.1665795894e-2F;
  p = p * r + 1.6666665459e-1F;
  p = p * r + 5.0000001201e-1F;
  p = p * r * r + r + 1.0F;
  const auto power = static_cast<std::int32_t>(n) + 127;
  return p * std::bit_cast<float>(power << 23);
}

TAPETUNE_SIMD void silu_mul_range(float* gate, const float* up, std::int64_t count) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) gate[i] = gate[i] / (1.0F + fast_exp(-gate[i])) * up[i];
}

}  // namespace

bool fused(const at::Tensor& x) {
  return x.is_cpu() && x.scalar_type() == at::kFloat && !(c10::GradMode::is_enabled() && x.requires_grad());
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  if (!fused(x) || weight.scalar_type() != at::kFloat || !weight.is_contiguous()) {
    const auto precise = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const at::Tensor wide = x.to(precise);
    const at::Tensor scaled = wide * at::rsqrt(wide.square().mean(-1, true) + eps);
    return (weight.to(precise) * scaled.to(x.scalar_type()).to(precise)).to(x.scalar_type());
  }
  const at::Tensor in = x.contiguous();
  at::Tensor out = at::empty_like(in);
  const std::int64_t width = in.size(-1), rows = in.numel() / width;
  const auto* from = in.const_data_ptr<float>();
  const auto* w = weight.const_data_ptr<float>();
  auto* to = out.mutable_data_ptr<float>();
  at::parallel_for(0, rows, std::max<std::int64_t>(1, grain / width), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      rms_norm_row(from + r * width, w, to + r * width, width, static_cast<float>(eps));
    }
  });
  return out;
}

at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const std::int64_t batch = x.size(0), tokens = x.size(1), heads = x.size(2), half = x.size(3) / 2;
  const std::int64_t channels = cos.size(1), group = heads / channels;
  if (!fused(x) || !x.is_contiguous() || cos.scalar_type() != at::kFloat || !cos.is_contiguous() ||
      !sin.is_contiguous()) {
    // [B|1, C, N, D/2] -> [B|1, N, H or 1, D/2]
    const auto spread = [&](const at::Tensor& t) {
      const at::Tensor by_token = t.to(x.scalar_type()).transpose(1, 2);
      return channels == 1 ? by_token : by_token.repeat_interleave(group, 2);
    };
    const at::Tensor c = spread(cos), s = spread(sin);
    const at::Tensor a = x.narrow(-1, 0, half), b = x.narrow(-1, half, half);
    return at::cat({a * c - b * s, b * c + a * s}, -1);
  }
  auto* data = x.mutable_data_ptr<float>();
  const auto* c = cos.const_data_ptr<float>();
  const auto* s = sin.const_data_ptr<float>();
  const std::int64_t batch_stride = cos.size(0) == 1 ? 0 : channels * tokens * half;
  at::parallel_for(0, batch * tokens, std::max<std::int64_t>(1, grain / (heads * half)),
                   [&](std::int64_t begin, std::int64_t end) {
                     for (std::int64_t row = begin; row < end; ++row) {
                       const std::int64_t b = row / tokens, n = row % tokens;
                       for (std::int64_t h = 0; h < heads; ++h) {
                         const std::int64_t angle = b * batch_stride + ((h / group) * tokens + n) * half;
                         rotate_row(data + (row * heads + h) * 2 * half, c + angle, s + angle, half);
                       }
                     }
                   });
  return x;
}

at::Tensor silu_mul(const at::Tensor& gate, const at::Tensor& up) {
  if (!fused(gate) || !fused(up) || !gate.is_contiguous() || !up.is_contiguous()) return at::silu(gate) * up;
  auto* g = gate.mutable_data_ptr<float>();
  const auto* u = up.const_data_ptr<float>();
  at::parallel_for(0, gate.numel(), grain,
                   [&](std::int64_t begin, std::int64_t end) { silu_mul_range(g + begin, u + begin, end - begin); });
  return gate;
}

}  // namespace tapetune::kernels
