// Projections whose weights may be stored narrower than they are computed, and what may be added beside a frozen one.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

#include "checkpoint/weights.h"

namespace tapetune {

// LoRA matrices: scale * b a x, added to a projection's output; undefined: nothing is.
struct LoraWeights {
  at::Tensor a;  // [r, in]
  at::Tensor b;  // [out, r]
  double scale = 1.0;
};

// x weight^T + bias in x's dtype: [..., in] -> [..., out]. No gradient.
at::Tensor apply(const Linear& linear, const at::Tensor& x);

// The projections that read one input, together, each with its addition (`added` is empty or has one each).
// The backward keeps x only where an addition or a trained weight asks for it, never W + BA.
// `gradients_only`: the values will not be read, only gradients; they are then not computed.
std::vector<at::Tensor> project(std::span<const Linear> linears, std::span<const LoraWeights> added,
                                const at::Tensor& x, bool gradients_only = false);

// One of them with nothing added: for adapters that work around the frozen projection by operations of autograd.
at::Tensor project(const Linear& linear, const at::Tensor& x, bool gradients_only = false);

// The dtype to multiply in: x's, or f32 where this CPU is slow at it.
at::ScalarType arithmetic_dtype(const at::Tensor& x);

// Whether this CPU multiplies bf16 at speed; where not, bf16 is storage and f32 is arithmetic.
bool cpu_has_fast_bf16();

// To be called before the first product. oneDNN, by which LibTorch multiplies bf16, asks the processor how large AMX's
// tiles are. Virtual machines have been seen that offer AMX and hide that answer, where it ends the process with an
// illegal instruction; AMX is then disabled in oneDNN.
void disable_broken_amx();

}  // namespace tapetune
