// Products of a few rows with a weight matrix: the work of decoding, bound by reading the weights once.
#pragma once

#include <ATen/core/Tensor.h>

namespace tapetune::kernels {

// Up to this many rows are worth it; more are a matrix product.
inline constexpr std::int64_t matvec_rows = 16;

// True for CPU tensors without a gradient: x f32, weight f32 or bf16, contiguous.
bool matvec_applies(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

// x weight^T + bias, summed in f32. A row's result does not depend on the other rows.
at::Tensor matvec(const at::Tensor& x, const at::Tensor& weight,
                  const at::Tensor& bias);  // [R, I], [O, I], [O] -> [R, O]

}  // namespace tapetune::kernels
