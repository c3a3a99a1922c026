// The update of a position state whose channels mix: by attention's result, then by a matrix of each token's own.
#pragma once

#include <ATen/core/Tensor.h>

namespace tapetune::kernels {

// (1 + change) (position + mix attended), token by token, with its gradients.
at::Tensor update_position(const at::Tensor& position,  // [B|1, N, C or 1, D]
                           const at::Tensor& attended,  // [B, N, H, D]
                           const at::Tensor& mix,       // [C, H]
                           const at::Tensor& change);   // [B, N, C, C] -> [B, N, C, D]

}  // namespace tapetune::kernels
