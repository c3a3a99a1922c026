// Causal attention: over whole batches, over padded rows, and over caches; memory linear in the length.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/attention.h"
#include "model/cache.h"

namespace tapetune {

// The part of a padded row that holds tokens: [begin, end).
struct RowSpan {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

// What selective checkpointing saves of a layer: attention is expensive to recompute, its result is not large.
struct SavedAttention {
  kernels::Attended result;
  bool filled = false;
};

struct AttentionInput {
  std::int64_t layer = 0;
  at::Tensor q;                            // [B, N, H, D], rotated
  at::Tensor k;                            // [B, N, K, D], rotated
  at::Tensor v;                            // [B, N, K, D]
  at::Tensor extra_values;                 // [B, N, K, D]: more values under the same weights, or undefined
  double scale = 1.0;                      // on q k^T
  std::span<const RowSpan> spans;          // one a row, or empty: no padding
  std::span<SequenceCache* const> caches;  // one a row, or empty: no past
  kernels::Cuts cuts;                      // where attention begins anew; empty: nowhere
  SavedAttention* saved = nullptr;         // filled when it is not, used when it is
  bool apart = false;                      // whoever uses the results keeps them, see `lse`
};

struct AttentionOutput {
  at::Tensor values;        // [B, N, H, D]; rows of padding are zeros
  at::Tensor extra_output;  // [B, N, H, D], from `extra_values`
  // [B, H, N], with `apart` and gradients only: the results are then not kept for the backward, and what it needs of
  // them comes as the gradient of this: minus kernels::attention_delta of each.
  at::Tensor lse;
};

// Every token sees itself and all before it, back to the last cut.
AttentionOutput causal_attention(const AttentionInput& in);

}  // namespace tapetune
