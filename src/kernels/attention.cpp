#include "kernels/attention.h"

#include "core/error.h"
#include "kernels/attention_paths.h"

namespace tapetune::kernels {

namespace {

bool in_tiles(const at::Tensor& q) { return q.is_cpu() && q.scalar_type() == at::kFloat; }

AttentionShape checked_shape(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const at::Tensor& extra_values, const Scores& scores) {
  for (const at::Tensor& x : {q, k, v, extra_values}) {
    if (x.defined() && (x.dim() != 4 || x.device() != q.device() || x.scalar_type() != q.scalar_type())) {
      fail("attention", "queries, keys and values must have 4 axes, one dtype and one device.");
    }
  }
  const AttentionShape s{q.size(0), q.size(1), k.size(1), q.size(2), k.size(2), q.size(3)};
  const std::vector<std::int64_t> sizes{s.batch, s.keys, s.key_heads, s.width};
  if (s.keys < s.queries || s.key_heads < 1 || s.heads % s.key_heads != 0 || k.sizes() != sizes || v.sizes() != sizes ||
      (extra_values.defined() && extra_values.sizes() != sizes)) {
    fail("attention", "queries [{}] do not go with keys [{}] and values [{}].", fmt::join(q.sizes(), ", "),
         fmt::join(k.sizes(), ", "), fmt::join(v.sizes(), ", "));
  }
  if (!scores.visible.regions.empty() && s.queries != s.keys) {
    fail("attention", "starts need all of a sequence's queries, without past keys; there are {} of {}.", s.queries,
         s.keys);
  }
  const at::Tensor& bias = scores.bias;
  if (bias.defined() && (bias.dim() != 2 || bias.size(0) != s.heads || bias.size(1) < s.keys)) {
    fail("attention", "a bias [{}] is none of {} heads and at least {} distances.", fmt::join(bias.sizes(), ", "),
         s.heads, s.keys);
  }
  return s;
}

}  // namespace

Attended attention_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const at::Tensor& extra_values, const Scores& scores) {
  const AttentionShape s = checked_shape(q, k, v, extra_values, scores);
  return in_tiles(q) ? forward_in_tiles(s, q, k, v, extra_values, scores)
                     : forward_in_blocks(s, q, k, v, extra_values, scores);
}

at::Tensor attention_delta(const at::Tensor& result, const at::Tensor& d_result) {
  if (in_tiles(result) && in_tiles(d_result)) return delta_in_rows(result, d_result);
  const auto dtype = result.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return (result.to(dtype) * d_result.to(dtype)).sum(-1);
}

AttentionGradients attention_backward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                      const at::Tensor& extra_values, const at::Tensor& lse, const at::Tensor& delta,
                                      const at::Tensor& d_values, const at::Tensor& d_extra_output,
                                      const Scores& scores, bool need_extra, bool need_bias) {
  const AttentionShape s = checked_shape(q, k, v, extra_values, scores);
  const auto backward = in_tiles(q) ? backward_in_tiles : backward_in_blocks;
  return backward(s, q, k, v, extra_values, lse, delta, d_values, d_extra_output, scores, need_extra, need_bias);
}

AttentionGradients attention_backward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                      const at::Tensor& extra_values, const Attended& out, const at::Tensor& d_values,
                                      const at::Tensor& d_extra_output, const Scores& scores, bool need_extra,
                                      bool need_bias) {
  at::Tensor delta =
      d_values.defined() ? attention_delta(out.values, d_values) : at::zeros(q.sizes().slice(0, 3), out.lse.options());
  if (d_extra_output.defined()) delta.add_(attention_delta(out.extra_output, d_extra_output));
  return attention_backward(q, k, v, extra_values, out.lse, delta, d_values, d_extra_output, scores, need_extra,
                            need_bias);
}

at::Tensor attention_weights(const at::Tensor& q, const at::Tensor& k, const Scores& scores) {
  return dense_weights(checked_shape(q, k, k, {}, scores), q.to(at::kDouble), k.to(at::kDouble), scores);
}

}  // namespace tapetune::kernels
