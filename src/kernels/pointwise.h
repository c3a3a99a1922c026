// Fused element-wise operations. CPU, f32 and no gradient: one pass over memory; otherwise the same from ATen's parts.
#pragma once

#include <ATen/core/Tensor.h>

namespace tapetune::kernels {

// True where the fused form applies: it writes no graph and knows only f32 in CPU memory.
bool fused(const at::Tensor& x);
// Whether a gradient is asked for through this tensor; false where it is undefined.
bool wants_gradient(const at::Tensor& x);

// x / sqrt(mean(x^2) + eps) * weight, over the last axis; statistics in f32 at least.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);  // [..., W], [W] -> [..., W]

// [x1 cos - x2 sin, x2 cos + x1 sin], x1 and x2 the two halves of a head (Hugging Face's layout).
// Head h of H takes channel h * C / H of the C that cos and sin have. May reuse x's memory.
at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);  // [B, N, H, D], [B|1, C, N, D/2]

// silu(gate) * up. May reuse gate's memory.
at::Tensor silu_mul(const at::Tensor& gate, const at::Tensor& up);

}  // namespace tapetune::kernels
