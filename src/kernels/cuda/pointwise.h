// The CUDA half of kernels/pointwise.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>

namespace tapetune::kernels::cuda {

// On one GPU, contiguous, all f32 or all bf16, and no gradient wanted.
bool applies(std::initializer_list<at::Tensor> tensors);

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);
at::Tensor rotate(const at::Tensor& x, const at::Tensor& position);
at::Tensor silu_mul(const at::Tensor& gate, const at::Tensor& up);

}  // namespace tapetune::kernels::cuda
