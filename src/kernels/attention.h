// Causal attention of whole sequences: no matrix of all scores, neither forward nor backward. f32 on the CPU goes
// through our own loops in tiles, all else through ATen's operations by blocks of queries.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "kernels/visible.h"

namespace tapetune::kernels {

// What decides a query's weights besides q and k: softmax(q k^T scale + bias) over the keys that it sees.
struct Scores {
  double scale = 1;
  Visible visible = {};
  at::Tensor bias =
      {};  // [H, M or more]: entry d is added to the score of the key d tokens back; undefined: nothing is
};

struct Attended {
  at::Tensor values;        // [B, N, H, D]
  at::Tensor extra_output;  // [B, N, H, D]; undefined without extra values
  at::Tensor lse;           // [B, H, N]: log of the sum of exponentials of a query's scores
};

// Those weights applied to v and, where they are defined, to `extra_values`. The N queries are the last of the M
// positions; starts (but not windows) need M = N. Head h uses the key and value head h / (H / K). Any strides, also 0;
// the results are contiguous. In f32 on the CPU the same bits for any number of threads, and `values` has the same bits
// without extra values.
Attended attention_forward(const at::Tensor& q,             // [B, N, H, D]
                           const at::Tensor& k,             // [B, M, K, D]
                           const at::Tensor& v,             // [B, M, K, D]
                           const at::Tensor& extra_values,  // [B, M, K, D] or undefined
                           const Scores& scores);

struct AttentionGradients {
  at::Tensor q;                   // [B, N, H, D]
  at::Tensor k, v, extra_values;  // [B, M, K, D]; extra_values: undefined unless wanted
  at::Tensor bias;                // as the bias; undefined unless wanted
};

// All that the gradient needs of a result is its product with its own gradient, head by head: [B, N, H] of [B, N, H,
// D]. Extra values add their own.
at::Tensor attention_delta(const at::Tensor& result, const at::Tensor& d_result);

// d_values, d_extra_output: [B, N, H, D]; an undefined one counts as zero.
AttentionGradients attention_backward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                      const at::Tensor& extra_values, const at::Tensor& lse, const at::Tensor& delta,
                                      const at::Tensor& d_values, const at::Tensor& d_extra_output,
                                      const Scores& scores, bool need_extra, bool need_bias);
// The same with delta of the forward's own results.
AttentionGradients attention_backward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                      const at::Tensor& extra_values, const Attended& out, const at::Tensor& d_values,
                                      const at::Tensor& d_extra_output, const Scores& scores, bool need_extra,
                                      bool need_bias);

// The weights themselves, in f64: for looking at, and for texts so short that N x M may exist.
at::Tensor attention_weights(const at::Tensor& q, const at::Tensor& k, const Scores& scores);  // -> [B, H, N, M]

}  // namespace tapetune::kernels
