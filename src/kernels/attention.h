// Causal attention of whole sequences in tiles: no matrix of scores, neither forward nor backward. f32 on the CPU.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tapetune::kernels {

// Where the keys that a token may see begin: it sees those from the last cut at or before it, up to itself. One list
// for the first half of the heads, one for the second, each from 0 on and increasing; an empty one: everything before.
struct Cuts {
  std::vector<std::int64_t> first, second;
};

struct Attended {
  at::Tensor values;        // [B, N, H, D]
  at::Tensor extra_output;  // [B, N, H, D]; undefined without extra values
  at::Tensor lse;           // [B, H, N]: log of the sum of exponentials of a query's scaled scores
};

// softmax(q k^T scale), applied to v and, if they are defined, to `extra_values` with the same weights. The N queries
// are the last of the M positions; cuts need M = N. Head h uses the key and value head h / (H / K). Any strides, also
// 0; the results are contiguous. The same bits for any number of threads, and `values` has the same bits without extra
// values.
Attended attention_forward(const at::Tensor& q,             // [B, N, H, D]
                           const at::Tensor& k,             // [B, M, K, D]
                           const at::Tensor& v,             // [B, M, K, D]
                           const at::Tensor& extra_values,  // [B, M, K, D] or undefined
                           double scale, const Cuts& cuts = {});

struct AttentionGradients {
  at::Tensor q;                   // [B, N, H, D]
  at::Tensor k, v, extra_values;  // [B, M, K, D]; extra_values: undefined unless wanted
};

// d_values, d_extra_output: [B, N, H, D]; an undefined one counts as zero.
AttentionGradients attention_backward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                      const at::Tensor& extra_values, const Attended& out, const at::Tensor& d_values,
                                      const at::Tensor& d_extra_output, double scale, const Cuts& cuts,
                                      bool need_extra);

// All that the gradient needs of a result is its product with its own gradient, head by head: [B, N, H] of [B, N, H,
// D]. Extra values add their own.
at::Tensor attention_delta(const at::Tensor& result, const at::Tensor& d_result);
// The same from that product, where the result itself is elsewhere.
AttentionGradients attention_backward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                      const at::Tensor& extra_values, const at::Tensor& lse, const at::Tensor& delta,
                                      const at::Tensor& d_values, const at::Tensor& d_extra_output, double scale,
                                      const Cuts& cuts, bool need_extra);

}  // namespace tapetune::kernels
