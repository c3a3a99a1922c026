#include "model/attention.h"

#include "kernels/decode_attention.h"
#include "kernels/pointwise.h"
#include "model/linear.h"

namespace tapetune {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

struct Call {
  double scale;
  kernels::Cuts cuts;
  SavedAttention* saved;
  bool apart;
};

kernels::Attended run_kernel(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const at::Tensor& extra_values, const Call& call) {
  if (call.saved != nullptr && call.saved->filled) return call.saved->result;
  kernels::Attended out = kernels::attention_forward(q, k, v, extra_values, call.scale, call.cuts);
  if (call.saved != nullptr) *call.saved = {out, true};
  return out;
}

struct Attention : Function<Attention> {
  struct Holder : torch::CustomClassHolder {
    explicit Holder(Call given) : call(std::move(given)) {}
    Call call;
  };
  static variable_list forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const std::optional<at::Tensor>& given, const Call* call) {
    const at::Tensor extra_values = given.value_or(at::Tensor());
    const kernels::Attended out = run_kernel(q, k, v, extra_values, *call);
    // New handles: what is saved must not become part of this graph.
    const at::Tensor values = out.values.detach(),
                     extra_output = extra_values.defined() ? out.extra_output.detach() : at::Tensor(),
                     lse = out.lse.detach();
    ctx->save_for_backward(
        {q, k, v, extra_values, call->apart ? at::Tensor() : values, call->apart ? at::Tensor() : extra_output, lse});
    ctx->saved_data["call"] = c10::IValue::make_capsule(c10::make_intrusive<Holder>(*call));
    ctx->set_materialize_grads(false);
    variable_list all{values};
    if (extra_values.defined()) all.push_back(extra_output);
    if (call->apart) all.push_back(lse);
    return all;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list s = ctx->get_saved_variables();
    const Call& call = c10::static_intrusive_pointer_cast<Holder>(ctx->saved_data["call"].toCapsule())->call;
    const at::Tensor d_extra_output = s[3].defined() ? grads[1] : at::Tensor();
    const bool need_extra = s[3].defined() && ctx->needs_input_grad(3);
    const kernels::AttentionGradients d =
        call.apart ? kernels::attention_backward(s[0], s[1], s[2], s[3], s[6], grads.back().transpose(1, 2).neg(),
                                                 grads[0], d_extra_output, call.scale, call.cuts, need_extra)
                   : kernels::attention_backward(s[0], s[1], s[2], s[3], {s[4], s[5], s[6]}, grads[0], d_extra_output,
                                                 call.scale, call.cuts, need_extra);
    return {d.q, d.k, d.v, d.extra_values, {}};
  }
};

// ATen's own attention, where ours does not go: [B, N, H, D] over [B, M, K, D].
at::Tensor flash(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& mask,
                 bool causal, double scale) {
  return at::scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, 0.0, causal,
                                          scale, /*enable_gqa=*/q.size(2) != k.size(2))
      .transpose(1, 2);
}

// New tokens behind a past. The mask goes a block of queries at a time, never N x N.
at::Tensor flash_after_past(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale) {
  constexpr std::int64_t block = 256;
  const std::int64_t tokens = q.size(1), past = k.size(1) - tokens;
  if (past == 0 || tokens == 1) return flash(q, k, v, std::nullopt, past == 0 && tokens > 1, scale);
  std::vector<at::Tensor> parts;
  for (std::int64_t begin = 0; begin < tokens; begin += block) {
    const std::int64_t count = std::min(block, tokens - begin), seen = past + begin + count;
    const at::Tensor rows = at::arange(past + begin, seen, q.options().dtype(at::kLong)).unsqueeze(1);
    const at::Tensor hidden = at::arange(seen, q.options().dtype(at::kLong)) > rows;  // [count, seen]
    const at::Tensor mask = at::zeros({count, seen}, q.options()).masked_fill_(hidden, -INFINITY);
    parts.push_back(flash(q.narrow(1, begin, count), k.narrow(1, 0, seen), v.narrow(1, 0, seen), mask, false, scale));
  }
  return parts.size() == 1 ? parts.front() : at::cat(parts, 1);
}

at::Tensor flash_in_groups(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale,
                           const kernels::Cuts& cuts) {
  if (cuts.first.empty()) return flash_after_past(q, k, v, scale);
  const std::int64_t tokens = q.size(1), half = q.size(2) / 2, group = q.size(2) / k.size(2);
  // Half of the heads need not be whole groups of heads, so each gets its own keys.
  const at::Tensor keys = k.repeat_interleave(group, 2), values = v.repeat_interleave(group, 2);
  const auto part = [&](std::int64_t head, const std::vector<std::int64_t>& starts) {
    std::vector<at::Tensor> out;
    for (std::size_t i = 0; i < starts.size(); ++i) {
      const std::int64_t end = i + 1 < starts.size() ? starts[i + 1] : tokens, count = end - starts[i];
      const auto cut = [&](const at::Tensor& t) { return t.narrow(2, head, half).narrow(1, starts[i], count); };
      out.push_back(flash(cut(q), cut(keys), cut(values), std::nullopt, true, scale));
    }
    return at::cat(out, 1);
  };
  return at::cat({part(0, cuts.first), part(half, cuts.second)}, 2);
}

// N queries at the end of M keys, all rows alike.
AttentionOutput attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& extra_values,
                       const Call& call) {
  const auto dtype = q.scalar_type();
  const bool ours = q.is_cpu() && (dtype == at::kFloat || arithmetic_dtype(q) == at::kFloat);
  if (!ours) {
    return {
        flash_in_groups(q, k, v, call.scale, call.cuts),
        extra_values.defined() ? flash_in_groups(q, k, extra_values.to(dtype), call.scale, call.cuts) : at::Tensor(),
        {}};
  }
  const auto wide = [](const at::Tensor& t) { return t.defined() ? t.to(at::kFloat) : t; };
  const at::Tensor wide_q = wide(q), wide_k = wide(k), wide_v = wide(v), wide_extra = wide(extra_values);
  at::Tensor values, extra_output, lse;
  if (kernels::wants_gradient(wide_q) || kernels::wants_gradient(wide_k) || kernels::wants_gradient(wide_v) ||
      kernels::wants_gradient(wide_extra)) {
    const variable_list out = Attention::apply(
        wide_q, wide_k, wide_v, extra_values.defined() ? std::optional(wide_extra) : std::nullopt, &call);
    values = out[0];
    if (extra_values.defined()) extra_output = out[1];
    if (call.apart) lse = out.back();
  } else {
    const kernels::Attended out = run_kernel(wide_q, wide_k, wide_v, wide_extra, call);
    values = out.values;
    extra_output = out.extra_output;
  }
  return {values.to(dtype), extra_output.defined() ? extra_output.to(extra_values.scalar_type()) : at::Tensor(), lse};
}

// One row behind its past.
AttentionOutput attend_cached(const at::Tensor& q, const SequenceCache::View& all, double scale) {
  if (q.size(1) == 1 && kernels::fused(q)) {
    const auto [values, extra_output] = kernels::decode_attention(q[0][0], all.k, all.v, all.position, scale);
    const auto row = [](const at::Tensor& t) { return t.defined() ? t.unsqueeze(0).unsqueeze(0) : t; };
    return {row(values), row(extra_output), {}};
  }
  const auto by_token = [](const at::Tensor& t) { return t.defined() ? t.transpose(0, 1).unsqueeze(0) : t; };
  return attend(q, by_token(all.k), by_token(all.v), by_token(all.position), {scale, {}, nullptr, false});
}

}  // namespace

AttentionOutput causal_attention(const AttentionInput& in) {
  const std::int64_t batch = in.q.size(0), tokens = in.q.size(1);
  const bool padded = std::any_of(in.spans.begin(), in.spans.end(),
                                  [&](const RowSpan& span) { return span.begin != 0 || span.end != tokens; });
  if (in.caches.empty() && !padded)
    return attend(in.q, in.k, in.v, in.extra_values, {in.scale, in.cuts, in.saved, in.apart});

  std::vector<at::Tensor> values, extra_output;
  for (std::int64_t b = 0; b < batch; ++b) {
    const RowSpan span = padded ? in.spans[static_cast<std::size_t>(b)] : RowSpan{0, tokens};
    const std::int64_t count = span.end - span.begin;
    // Tokens of a row are contiguous, so a row without its padding is plain causal attention.
    const auto row = [&](const at::Tensor& t) {
      return t.defined() ? t.narrow(0, b, 1).narrow(1, span.begin, count) : t;
    };
    const at::Tensor q = row(in.q), k = row(in.k), v = row(in.v), extra_values = row(in.extra_values);
    AttentionOutput out;
    if (in.caches.empty()) {
      out = attend(q, k, v, extra_values, {in.scale, {}, nullptr, false});
    } else {
      const auto by_head = [](const at::Tensor& t) { return t.defined() ? t.squeeze(0).transpose(0, 1) : t; };
      SequenceCache& cache = *in.caches[static_cast<std::size_t>(b)];
      out = attend_cached(q, cache.append(in.layer, {by_head(k), by_head(v), by_head(extra_values)}), in.scale);
    }
    const auto unpadded = [&](const at::Tensor& t) {
      return t.defined() && count != tokens ? at::constant_pad_nd(t, {0, 0, 0, 0, span.begin, tokens - span.end}) : t;
    };
    values.push_back(unpadded(out.values));
    extra_output.push_back(unpadded(out.extra_output));
  }
  const auto joined = [](const std::vector<at::Tensor>& rows) {
    return rows.size() == 1 || !rows.front().defined() ? rows.front() : at::cat(rows);
  };
  return {joined(values), joined(extra_output), {}};
}

}  // namespace tapetune
