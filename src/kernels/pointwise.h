// Fused element-wise operations with their gradients. CPU and f32: one pass over memory; otherwise the same from ATen's
// parts.
#pragma once

#include <ATen/core/Tensor.h>

namespace tapetune::kernels {

// True where the fused form without a graph applies: f32 in CPU memory and no gradient wanted.
bool fused(const at::Tensor& x);
// Whether a gradient is asked for through this tensor; false where it is undefined.
bool wants_gradient(const at::Tensor& x);

// x / sqrt(mean(x^2) + eps) * weight, over the last axis; statistics in f32 at least.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);  // [..., W], [W] -> [..., W]

// [x1 c - x2 s, x2 c + x1 s], x1 and x2 the two halves of a head (Hugging Face's layout), c and s those of the
// position. Head h of H takes channel h * C / H. May reuse x's memory where no gradient is wanted.
at::Tensor rotate(const at::Tensor& x, const at::Tensor& position);  // [B, N, H, D], [B|1, N, C, D]

// silu(gate) * up. May reuse gate's memory where no gradient is wanted.
at::Tensor silu_mul(const at::Tensor& gate, const at::Tensor& up);

}  // namespace tapetune::kernels
