// Attention of one new token over a cache.
#pragma once

#include <ATen/core/Tensor.h>

namespace tapetune::kernels {

// CPU, f32, no gradient. Keys and values may be longer than `length`; query head h reads key head h * K / H.
at::Tensor decode_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, std::int64_t length,
                            double scale);  // [H, D], [K, T, D], [K, T, D] -> [H, D]

}  // namespace tapetune::kernels
