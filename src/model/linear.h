// A projection whose weight may be stored narrower than it is computed.
#pragma once

#include <ATen/core/Tensor.h>

namespace tapetune {

struct Linear {
  at::Tensor weight;  // [out, in], in the file's dtype and mapped
  at::Tensor bias;    // [out], or undefined
};

// x weight^T + bias in x's dtype: [..., in] -> [..., out].
at::Tensor apply(const Linear& linear, const at::Tensor& x);

// Whether this CPU multiplies bf16 at speed; where not, bf16 is storage and f32 is arithmetic.
bool cpu_has_fast_bf16();

}  // namespace tapetune
