#include "model/attention.h"

#include "core/error.h"
#include "kernels/decode_attention.h"
#include "kernels/pointwise.h"
#include "model/linear.h"

namespace tapetune {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// The operands of attention, or their gradients. Undefined extra values and bias: there are none.
struct Operands {
  at::Tensor q, k, v, extra_values, bias;
};

struct Call {
  kernels::Scores scores;  // without the bias
  SavedAttention* saved = nullptr;
  std::shared_ptr<const SequenceExchange> exchange;
  at::ScalarType dtype;  // of q, k and v
  at::ScalarType work;   // in which the kernel gets them
  std::int64_t heads;    // of the model
};

// Our loops compute in f32; the other kernels in the dtype that they are given.
bool is_for_loops(const at::Tensor& q) {
  return q.is_cpu() && (q.scalar_type() == at::kFloat || arithmetic_dtype(q) == at::kFloat);
}

at::Tensor as(const at::Tensor& t, at::ScalarType dtype) { return t.defined() ? t.to(dtype) : t; }

// How often each key head is repeated, so that every rank gets those that its query heads use.
std::int64_t repeats(std::int64_t key_heads, std::int64_t heads, std::int64_t ranks) {
  if (key_heads % ranks == 0) return 1;
  return ranks % key_heads == 0 ? ranks / key_heads : heads / key_heads;
}

// Tensors at this rank's tokens to all tokens of its heads, or the way back. The gradient goes the other way, for those
// that want one. A node of its own: attention's has let go of what it saved when the gradients travel.
template <bool to_heads>
struct Exchanged : Function<Exchanged<to_heads>> {
  struct Holder : torch::CustomClassHolder {
    explicit Holder(std::shared_ptr<const SequenceExchange> given) : exchange(std::move(given)) {}
    std::shared_ptr<const SequenceExchange> exchange;
  };
  static variable_list forward(AutogradContext* ctx, at::TensorList all,
                               const std::shared_ptr<const SequenceExchange>* exchange) {
    ctx->saved_data["exchange"] = c10::IValue::make_capsule(c10::make_intrusive<Holder>(*exchange));
    ctx->set_materialize_grads(false);
    variable_list out = to_heads ? (*exchange)->to_heads(all.vec()) : (*exchange)->to_tokens(all.vec()), fixed;
    for (std::size_t i = 0; i < out.size(); ++i) {
      if (!all[i].requires_grad()) fixed.push_back(out[i]);
    }
    ctx->mark_non_differentiable(fixed);
    return out;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto holder = c10::static_intrusive_pointer_cast<Holder>(ctx->saved_data["exchange"].toCapsule());
    variable_list back = to_heads ? holder->exchange->to_tokens(grads) : holder->exchange->to_heads(grads);
    back.emplace_back();
    return back;
  }
};

// As the heads that are computed here need them.
Operands to_heads(const Operands& all, const Call& call) {
  if (!call.exchange) return all;
  const std::int64_t ranks = call.exchange->size, own = call.heads / ranks;
  const std::int64_t times = repeats(all.k.size(2), call.heads, ranks);
  const auto repeated = [&](const at::Tensor& t) { return times > 1 ? t.repeat_interleave(times, 2) : t; };
  std::vector<at::Tensor> given{all.q, repeated(all.k), repeated(all.v)};
  if (all.extra_values.defined()) given.push_back(repeated(all.extra_values));
  const variable_list here = Exchanged<true>::apply(at::TensorList(given), &call.exchange);
  return {here[0], here[1], here[2], here.size() > 3 ? here[3] : at::Tensor(),
          all.bias.defined() ? all.bias.narrow(0, call.exchange->rank * own, own) : at::Tensor()};
}

// As the heads that are computed here have them.
kernels::Scores scores_here(const Call& call, const at::Tensor& bias) {
  kernels::Scores scores = call.scores;
  scores.bias = bias;
  if (call.exchange) {
    const std::int64_t own = call.heads / call.exchange->size;
    scores.visible = scores.visible.of_heads(call.exchange->rank * own, own);
  }
  return scores;
}

kernels::Attended run_kernel(const Operands& here, const Call& call) {
  if (call.saved != nullptr && std::exchange(call.saved->filled, false)) return std::exchange(call.saved->result, {});
  kernels::Attended out =
      kernels::attention_forward(as(here.q, call.work), as(here.k, call.work), as(here.v, call.work),
                                 as(here.extra_values, call.work), scores_here(call, here.bias));
  if (call.saved != nullptr) *call.saved = {out, true};
  return out;
}

// The results in the dtypes of their values, at this process's tokens.
AttentionOutput results(const kernels::Attended& out, const Operands& here, const Call& call) {
  const at::Tensor values = out.values.to(call.dtype),
                   extra = here.extra_values.defined() ? out.extra_output.to(here.extra_values.scalar_type())
                                                       : at::Tensor();
  if (!call.exchange) return {values, extra};
  const std::vector<at::Tensor> back = call.exchange->to_tokens({values, extra});
  return {back[0], back[1]};
}

// Attention with its gradient: of this rank's heads, with the results at its tokens.
struct Attention : Function<Attention> {
  struct Holder : torch::CustomClassHolder {
    explicit Holder(Call given) : call(std::move(given)) { call.saved = nullptr; }
    Call call;
  };
  static variable_list forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const std::optional<at::Tensor>& extra_values, const std::optional<at::Tensor>& bias,
                               const Call* call) {
    const Operands here{q, k, v, extra_values.value_or(at::Tensor()), bias.value_or(at::Tensor())};
    const kernels::Attended out = run_kernel(here, *call);
    const AttentionOutput given = results(out, here, *call);
    // New handles: what is saved must not become part of this graph.
    const auto handle = [](const at::Tensor& t) { return t.defined() ? t.detach() : t; };
    const at::Tensor values = handle(given.values), extra_output = handle(given.extra_output);
    // The gradient needs the results where the tokens are: there they exist anyway.
    const bool apart = call->exchange != nullptr || values.scalar_type() == out.values.scalar_type();
    ctx->save_for_backward({here.q, here.k, here.v, here.extra_values, here.bias, apart ? values : out.values,
                            apart ? extra_output : out.extra_output, handle(out.lse)});
    ctx->saved_data["call"] = c10::IValue::make_capsule(c10::make_intrusive<Holder>(*call));
    ctx->set_materialize_grads(false);
    variable_list outputs{values};
    if (here.extra_values.defined()) outputs.push_back(extra_output);
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list s = ctx->get_saved_variables();
    const Call& call = c10::static_intrusive_pointer_cast<Holder>(ctx->saved_data["call"].toCapsule())->call;
    const Operands here{s[0], s[1], s[2], s[3], s[4]};
    const at::Tensor &values = s[5], &extra_output = s[6], &lse = s[7];
    at::Tensor d_values = grads[0], d_extra_output = here.extra_values.defined() ? grads[1] : at::Tensor();
    if (!d_values.defined() && !d_extra_output.defined()) return variable_list(6);

    at::Tensor delta;  // [B, N / S, H]
    const auto add_delta = [&](const at::Tensor& result, const at::Tensor& d_result) {
      if (!d_result.defined()) return;
      const at::Tensor own = kernels::attention_delta(as(result, call.work), as(d_result, call.work));
      delta = delta.defined() ? delta.add_(own) : own;
    };
    add_delta(values, d_values);
    add_delta(extra_output, d_extra_output);
    if (call.exchange) {
      const std::vector<at::Tensor> arrived = call.exchange->to_heads({d_values, d_extra_output, delta.unsqueeze(-1)});
      d_values = arrived[0];
      d_extra_output = arrived[1];
      delta = arrived[2].squeeze(-1);
    }
    // Autograd counts only the tensors that were given.
    const bool need_extra = here.extra_values.defined() && ctx->needs_input_grad(3);
    const bool need_bias = here.bias.defined() && ctx->needs_input_grad(here.extra_values.defined() ? 4 : 3);
    const kernels::AttentionGradients d =
        kernels::attention_backward(as(here.q, call.work), as(here.k, call.work), as(here.v, call.work),
                                    as(here.extra_values, call.work), lse, delta, as(d_values, call.work),
                                    as(d_extra_output, call.work), scores_here(call, here.bias), need_extra, need_bias);
    return {as(d.q, call.dtype),
            as(d.k, call.dtype),
            as(d.v, call.dtype),
            need_extra ? as(d.extra_values, here.extra_values.scalar_type()) : at::Tensor(),
            d.bias,
            {}};
  }
};

// ATen's own fused attention, which has its gradient: a call for each piece of the text whose tokens attend among
// themselves.
AttentionOutput attend_fused(const Operands& here, const Call& call) {
  const std::int64_t heads = here.q.size(2), tokens = here.q.size(1);
  const auto fused = [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& values) {
    return at::scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), values.transpose(1, 2), std::nullopt,
                                            0.0, tokens > 1, call.scores.scale,
                                            /*enable_gqa=*/q.size(2) != k.size(2))
        .transpose(1, 2);
  };
  const kernels::Visible visible = scores_here(call, {}).visible;
  const auto attended = [&](const at::Tensor& values) {
    if (!values.defined()) return at::Tensor();
    if (visible.plain()) return fused(here.q, here.k, values);
    // A piece's heads need not be whole groups of heads, so each gets its own keys.
    const std::int64_t group = heads / here.k.size(2);
    const at::Tensor all_keys = here.k.repeat_interleave(group, 2), all_values = values.repeat_interleave(group, 2);
    std::vector<at::Tensor> by_row, by_head, by_token;
    for (const kernels::Visible::Piece& piece : visible.pieces(here.q.size(0), heads, tokens)) {
      const auto own = [&](const at::Tensor& t) {
        return t.narrow(0, piece.row, piece.rows)
            .narrow(2, piece.head, piece.heads)
            .narrow(1, piece.begin, piece.end - piece.begin);
      };
      by_token.push_back(fused(own(here.q), own(all_keys), own(all_values)));
      if (piece.end < tokens) continue;
      by_head.push_back(at::cat(std::exchange(by_token, {}), 1));
      if (piece.head + piece.heads == heads) by_row.push_back(at::cat(std::exchange(by_head, {}), 2));
    }
    return at::cat(by_row);
  };
  const AttentionOutput out{attended(here.v), attended(here.extra_values)};
  if (!call.exchange) return out;
  std::vector<at::Tensor> all{out.values};
  if (out.extra_output.defined()) all.push_back(out.extra_output);
  const variable_list back = Exchanged<false>::apply(at::TensorList(all), &call.exchange);
  return {back[0], back.size() > 1 ? back[1] : at::Tensor()};
}

// Without a window as long as all keys, which hides none: what it does not change must not depend on it.
Call without_idle_window(Call call, std::int64_t keys) {
  if (call.exchange) keys *= call.exchange->size;
  if (call.scores.visible.window >= keys) call.scores.visible.window = 0;
  return call;
}

// N queries at the end of M keys, all rows alike.
AttentionOutput attend(const Operands& in, const Call& given_call) {
  const Call call = without_idle_window(given_call, in.k.size(1));
  const bool whole = in.q.size(1) == in.k.size(1), fits = whole || (in.q.size(1) == 1 && call.scores.visible.plain());
  if (call.work != at::kFloat && fits && call.scores.visible.window == 0 && !in.bias.defined()) {
    return attend_fused(to_heads({in.q, in.k, in.v, as(in.extra_values, call.dtype), {}}, call), call);
  }
  const Operands here = to_heads(in, call);
  const auto wants = [](const at::Tensor& t) { return t.defined() && kernels::wants_gradient(t); };
  if (!wants(here.q) && !wants(here.k) && !wants(here.v) && !wants(here.extra_values) && !wants(here.bias)) {
    return results(run_kernel(here, call), here, call);
  }
  const auto given = [](const at::Tensor& t) { return t.defined() ? std::optional(t) : std::nullopt; };
  const variable_list out = Attention::apply(here.q, here.k, here.v, given(here.extra_values), given(here.bias), &call);
  return {out[0], out.size() > 1 ? out[1] : at::Tensor()};
}

// One row behind its past.
AttentionOutput attend_cached(const at::Tensor& q, const SequenceCache::View& all, const Call& call,
                              const at::Tensor& bias) {
  if (q.size(1) == 1 && kernels::fused(q) && call.scores.visible.regions.empty()) {
    kernels::Scores scores = call.scores;
    scores.bias = bias;
    const auto [values, extra_output] = kernels::decode_attention(q[0][0], all.k, all.v, all.position, scores);
    const auto row = [](const at::Tensor& t) { return t.defined() ? t.unsqueeze(0).unsqueeze(0) : t; };
    return {row(values), row(extra_output)};
  }
  const auto by_token = [](const at::Tensor& t) { return t.defined() ? t.transpose(0, 1).unsqueeze(0) : t; };
  return attend({q, by_token(all.k), by_token(all.v), by_token(all.position), bias}, call);
}

// Who sees whom in a row of so many tokens, of which others have more.
kernels::Visible of_row(const kernels::Visible& visible, std::int64_t row, std::int64_t tokens) {
  kernels::Visible own = visible.of_row(row);
  for (kernels::Visible::Region& region : own.regions) {
    std::erase_if(region.starts, [&](std::int64_t start) { return start >= tokens; });
  }
  return own;
}

}  // namespace

AttentionOutput causal_attention(const AttentionInput& in) {
  const std::int64_t batch = in.q.size(0), tokens = in.q.size(1);
  const bool padded = std::any_of(in.spans.begin(), in.spans.end(),
                                  [&](const RowSpan& span) { return span.begin != 0 || span.end != tokens; });
  const at::Tensor& bias = in.scores.bias;
  Call call{
      in.scores,   in.saved, in.exchange, in.q.scalar_type(), is_for_loops(in.q) ? at::kFloat : in.q.scalar_type(),
      in.q.size(2)};
  call.scores.bias.reset();
  if (in.caches.empty() && !padded) return attend({in.q, in.k, in.v, in.extra_values, bias}, call);

  call.saved = nullptr;
  std::vector<at::Tensor> values, extra_output;
  for (std::int64_t b = 0; b < batch; ++b) {
    const RowSpan span = padded ? in.spans[static_cast<std::size_t>(b)] : RowSpan{0, tokens};
    const std::int64_t count = span.end - span.begin;
    // Tokens of a row are contiguous, so a row without its padding is plain causal attention.
    const auto row = [&](const at::Tensor& t) {
      return t.defined() ? t.narrow(0, b, 1).narrow(1, span.begin, count) : t;
    };
    const at::Tensor q = row(in.q), k = row(in.k), v = row(in.v), extra_values = row(in.extra_values);
    call.scores.visible = of_row(in.scores.visible, b, count);
    AttentionOutput out;
    if (in.caches.empty()) {
      out = attend({q, k, v, extra_values, bias}, call);
    } else {
      const auto by_head = [](const at::Tensor& t) { return t.defined() ? t.squeeze(0).transpose(0, 1) : t; };
      SequenceCache& cache = *in.caches[static_cast<std::size_t>(b)];
      out = attend_cached(q, cache.append(in.layer, {by_head(k), by_head(v), by_head(extra_values)}), call, bias);
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
  return {joined(values), joined(extra_output)};
}

}  // namespace tapetune
