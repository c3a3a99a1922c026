// Attention of one new token over a cache.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

#include "kernels/attention.h"

namespace tapetune::kernels {

// CPU, f32, no gradient: the token's weights applied to v and, where defined, to `extra_values`. Query head h reads key
// head h * K / H; the last two axes of a head's keys and values are contiguous. Starts are not for a single token.
std::pair<at::Tensor, at::Tensor> decode_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                   const at::Tensor& extra_values,
                                                   const Scores& scores);  // [H, D], [K, T, D] each -> [H, D] each

}  // namespace tapetune::kernels
