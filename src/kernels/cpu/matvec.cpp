#include "kernels/matvec.h"

#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>

#include "kernels/cpu/simd.h"
#include "kernels/pointwise.h"

namespace tapetune::kernels {

namespace {

constexpr std::int64_t block = 4;  // outputs at a time: enough sums in flight to hide the latency of an addition

inline float widen(float value) { return value; }
inline float widen(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

template <typename W>
inline __attribute__((always_inline)) void outputs(const float* x, std::int64_t rows, const W* w, const float* bias,
                                                   float* y, std::int64_t in, std::int64_t out, std::int64_t begin,
                                                   std::int64_t end) {
  std::int64_t o = begin;
  for (; o + block <= end; o += block) {
    const W *w0 = w + o * in, *w1 = w0 + in, *w2 = w1 + in, *w3 = w2 + in;
    for (std::int64_t r = 0; r < rows; ++r) {
      const float* xr = x + r * in;
      float a0 = 0, a1 = 0, a2 = 0, a3 = 0;
#pragma omp simd reduction(+ : a0, a1, a2, a3)
      for (std::int64_t i = 0; i < in; ++i) {
        a0 += xr[i] * widen(w0[i]);
        a1 += xr[i] * widen(w1[i]);
        a2 += xr[i] * widen(w2[i]);
        a3 += xr[i] * widen(w3[i]);
      }
      float* yr = y + r * out + o;
      yr[0] = a0, yr[1] = a1, yr[2] = a2, yr[3] = a3;
      if (bias != nullptr) {
        for (std::int64_t j = 0; j < block; ++j) yr[j] += bias[o + j];
      }
    }
  }
  for (; o < end; ++o) {
    for (std::int64_t r = 0; r < rows; ++r) {
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (std::int64_t i = 0; i < in; ++i) sum += x[r * in + i] * widen(w[o * in + i]);
      y[r * out + o] = sum + (bias != nullptr ? bias[o] : 0.0F);
    }
  }
}

TAPETUNE_SIMD void outputs_f32(const float* x, std::int64_t rows, const float* w, const float* bias, float* y,
                               std::int64_t in, std::int64_t out, std::int64_t begin, std::int64_t end) {
  outputs(x, rows, w, bias, y, in, out, begin, end);
}

TAPETUNE_SIMD void outputs_bf16(const float* x, std::int64_t rows, const std::uint16_t* w, const float* bias, float* y,
                                std::int64_t in, std::int64_t out, std::int64_t begin, std::int64_t end) {
  outputs(x, rows, w, bias, y, in, out, begin, end);
}

}  // namespace

bool matvec_applies(const at::Tensor& x, const at::Tensor& weight) {
  const auto dtype = weight.scalar_type();
  return fused(x) && weight.is_cpu() && !(c10::GradMode::is_enabled() && weight.requires_grad()) &&
         weight.is_contiguous() && (dtype == at::kFloat || dtype == at::kBFloat16) &&
         x.numel() <= matvec_rows * x.size(-1);
}

at::Tensor matvec(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const at::Tensor in = x.contiguous();
  const std::int64_t width = weight.size(1), out_width = weight.size(0), rows = in.numel() / width;
  at::Tensor out = at::empty({rows, out_width}, in.options());
  const at::Tensor wide_bias = bias.defined() ? bias.to(at::kFloat).contiguous() : at::Tensor();
  const auto* b = wide_bias.defined() ? wide_bias.const_data_ptr<float>() : nullptr;
  const auto* from = in.const_data_ptr<float>();
  auto* to = out.mutable_data_ptr<float>();
  const std::int64_t blocks = (out_width + block - 1) / block;
  // Blocks, not outputs, are shared out, so that an output's sum is formed alike with any number of threads.
  at::parallel_for(0, blocks, std::max<std::int64_t>(1, 32768 / (block * width)),
                   [&](std::int64_t first, std::int64_t last) {
                     const std::int64_t begin = first * block, end = std::min(last * block, out_width);
                     if (weight.scalar_type() == at::kFloat) {
                       outputs_f32(from, rows, weight.const_data_ptr<float>(), b, to, width, out_width, begin, end);
                     } else {
                       const auto* bits = static_cast<const std::uint16_t*>(weight.const_data_ptr());
                       outputs_bf16(from, rows, bits, b, to, width, out_width, begin, end);
                     }
                   });
  return out;
}

}  // namespace tapetune::kernels
