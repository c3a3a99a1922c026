// The two ways in which attention is computed; attention.cpp checks what it is given and chooses.
#pragma once

#include "kernels/attention.h"

namespace tapetune::kernels {

struct AttentionShape {
  std::int64_t batch, queries, keys, heads, key_heads, width;
  std::int64_t group() const { return heads / key_heads; }
  std::int64_t past() const { return keys - queries; }
};

// cpu/attention.cpp: f32, our own loops.
Attended forward_in_tiles(const AttentionShape& s, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const at::Tensor& extra_values, const Scores& scores);
AttentionGradients backward_in_tiles(const AttentionShape& s, const at::Tensor& q, const at::Tensor& k,
                                     const at::Tensor& v, const at::Tensor& extra_values, const at::Tensor& lse,
                                     const at::Tensor& delta, const at::Tensor& d_values,
                                     const at::Tensor& d_extra_output, const Scores& scores, bool need_extra,
                                     bool need_bias);
at::Tensor delta_in_rows(const at::Tensor& result, const at::Tensor& d_result);

// attention_blocks.cpp: any dtype and device, by blocks of queries; narrow dtypes are computed in f32.
Attended forward_in_blocks(const AttentionShape& s, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const at::Tensor& extra_values, const Scores& scores);
AttentionGradients backward_in_blocks(const AttentionShape& s, const at::Tensor& q, const at::Tensor& k,
                                      const at::Tensor& v, const at::Tensor& extra_values, const at::Tensor& lse,
                                      const at::Tensor& delta, const at::Tensor& d_values,
                                      const at::Tensor& d_extra_output, const Scores& scores, bool need_extra,
                                      bool need_bias);
at::Tensor dense_weights(const AttentionShape& s, const at::Tensor& q, const at::Tensor& k, const Scores& scores);

}  // namespace tapetune::kernels
