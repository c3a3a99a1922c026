// Causal attention: over whole batches, over padded rows, over caches, and over sequences that several processes share;
// memory linear in the length.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/attention.h"
#include "model/cache.h"
#include "model/parallel.h"

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
  at::Tensor q;                                      // [B, N, H, D], rotated
  at::Tensor k;                                      // [B, N, K, D], rotated
  at::Tensor v;                                      // [B, N, K, D]
  at::Tensor extra_values;                           // [B, N, K, D]: more values under the same weights, or undefined
  kernels::Scores scores;                            // of the whole sequence and all heads
  std::span<const RowSpan> spans;                    // one a row, or empty: no padding
  std::span<SequenceCache* const> caches;            // one a row, or empty: no past
  SavedAttention* saved = nullptr;                   // filled when it is not, emptied when it is
  std::shared_ptr<const SequenceExchange> exchange;  // null: this process has all tokens
};

struct AttentionOutput {
  at::Tensor values;        // [B, N, H, D]; rows of padding are zeros
  at::Tensor extra_output;  // [B, N, H, D], from `extra_values`
};

AttentionOutput causal_attention(const AttentionInput& in);

}  // namespace tapetune
