// Causal attention: over whole batches, over padded rows, and over caches; memory linear in the length.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "model/cache.h"

namespace tapetune {

// The part of a padded row that holds tokens: [begin, end).
struct RowSpan {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

struct AttentionInput {
  std::int64_t layer = 0;
  at::Tensor q;                            // [B, H, N, D], rotated
  at::Tensor k;                            // [B, K, N, D], rotated
  at::Tensor v;                            // [B, K, N, D]
  double scale = 1.0;                      // on q k^T
  std::span<const RowSpan> spans;          // one a row, or empty: no padding
  std::span<SequenceCache* const> caches;  // one a row, or empty: no past
};

// Every token sees itself and all before it: [B, H, N, D]. Rows of padding come out as zeros.
at::Tensor causal_attention(const AttentionInput& in);

}  // namespace tapetune
