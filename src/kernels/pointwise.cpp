#include "kernels/pointwise.h"

#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>

#include "kernels/cpu/loops.h"
#ifdef TAPETUNE_CUDA
#include "kernels/cuda/pointwise.h"
#endif

namespace tapetune::kernels {

namespace {

constexpr std::int64_t grain = 16384;  // elements a thread should get at least

}  // namespace

bool wants_gradient(const at::Tensor& x) { return x.defined() && c10::GradMode::is_enabled() && x.requires_grad(); }

bool fused(const at::Tensor& x) { return x.is_cpu() && x.scalar_type() == at::kFloat && !wants_gradient(x); }

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
#ifdef TAPETUNE_CUDA
  if (cuda::applies({x, weight})) return cuda::rms_norm(x, weight, eps);
#endif
  if (!fused(x) || !fused(weight) || !weight.is_contiguous()) {
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
      loops::rms_norm(from + r * width, w, to + r * width, width, static_cast<float>(eps));
    }
  });
  return out;
}

at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
#ifdef TAPETUNE_CUDA
  if (cuda::applies({x}) && !wants_gradient(cos) && !wants_gradient(sin)) return cuda::rotate(x, cos, sin);
#endif
  const std::int64_t batch = x.size(0), tokens = x.size(1), heads = x.size(2), half = x.size(3) / 2;
  const std::int64_t channels = cos.size(1), group = heads / channels;
  if (!fused(x) || !fused(cos) || !fused(sin) || !x.is_contiguous() || !cos.is_contiguous() || !sin.is_contiguous()) {
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
                         loops::rotate(data + (row * heads + h) * 2 * half, c + angle, s + angle, half);
                       }
                     }
                   });
  return x;
}

at::Tensor silu_mul(const at::Tensor& gate, const at::Tensor& up) {
#ifdef TAPETUNE_CUDA
  if (cuda::applies({gate, up})) return cuda::silu_mul(gate, up);
#endif
  if (!fused(gate) || !fused(up) || !gate.is_contiguous() || !up.is_contiguous()) return at::silu(gate) * up;
  auto* g = gate.mutable_data_ptr<float>();
  const auto* u = up.const_data_ptr<float>();
  at::parallel_for(0, gate.numel(), grain,
                   [&](std::int64_t begin, std::int64_t end) { loops::silu_mul(g + begin, u + begin, end - begin); });
  return gate;
}

}  // namespace tapetune::kernels
