#include "distributed/ulysses.h"

#include "core/error.h"
#include "kernels/attention.h"

namespace tapetune {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

struct Holder : torch::CustomClassHolder {
  explicit Holder(Group given) : group(std::move(given)) {}
  Group group;
};

// An all-to-all in flight, and how its rows become a tensor.
struct PendingAllToAll {
  at::Tensor rows;
  Group::Pending pending;
  std::function<at::Tensor(const at::Tensor&)> shaped;
  at::Tensor arrived() const {
    pending.wait();
    return shaped(rows);
  }
};

PendingAllToAll all_to_all(const Group& group, const at::Tensor& rows,
                           std::function<at::Tensor(const at::Tensor&)> shaped) {
  const at::Tensor from = rows.contiguous();
  at::Tensor to = at::empty_like(from);
  return {to, group.all_to_all(to, from), std::move(shaped)};
}

// [B, n, S h, D] -> [B, S n, h, D]: the other ranks' tokens come, the other ranks' heads go.
PendingAllToAll tokens_in(const Group& group, const at::Tensor& t) {
  const std::int64_t sequence_size = group.size(), batch = t.size(0), n = t.size(1), h = t.size(2) / sequence_size,
                     width = t.size(3);
  const at::Tensor by_rank =
      t.reshape({batch, n, sequence_size, h, width}).permute({2, 0, 1, 3, 4});  // [S, B, n, h, D]
  return all_to_all(group, by_rank, [=](const at::Tensor& came) {
    return came.permute({1, 0, 2, 3, 4}).reshape({batch, sequence_size * n, h, width});
  });
}

// The way back.
PendingAllToAll heads_in(const Group& group, const at::Tensor& t) {
  const std::int64_t sequence_size = group.size(), batch = t.size(0), n = t.size(1) / sequence_size, h = t.size(2),
                     width = t.size(3);
  const at::Tensor by_rank =
      t.reshape({batch, sequence_size, n, h, width}).permute({1, 0, 2, 3, 4});  // [S, B, n, h, D]
  return all_to_all(group, by_rank, [=](const at::Tensor& came) {
    return came.permute({1, 2, 0, 3, 4}).reshape({batch, n, sequence_size * h, width});
  });
}

void hold(AutogradContext* ctx, const Group& group) {
  ctx->saved_data["group"] = c10::IValue::make_capsule(c10::make_intrusive<Holder>(group));
}
const Group& held(AutogradContext* ctx) {
  return c10::static_intrusive_pointer_cast<Holder>(ctx->saved_data["group"].toCapsule())->group;
}

// Each is the other's gradient.
struct ToHeads : Function<ToHeads> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& t, const Group* group) {
    hold(ctx, *group);
    return tokens_in(*group, t).arrived();
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return {heads_in(held(ctx), grads[0]).arrived(), {}};
  }
};

// The result of attention is kept here, among the tokens' activations, and not for its heads' gradient a second time,
// which gets a number a head and token instead.
struct ToTokens : Function<ToTokens> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& t, const std::optional<at::Tensor>& lse,
                            const Group* group) {
    hold(ctx, *group);
    at::Tensor out = heads_in(*group, t).arrived();
    ctx->save_for_backward({lse ? out : at::Tensor()});
    return out;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Group& group = held(ctx);
    const at::Tensor out = ctx->get_saved_variables()[0];
    const PendingAllToAll d_t = tokens_in(group, grads[0]);
    at::Tensor d_lse;
    if (out.defined()) {
      const at::Tensor delta = kernels::attention_delta(out.to(at::kFloat), grads[0].to(at::kFloat));  // [B, n, H]
      d_lse = tokens_in(group, delta.unsqueeze(-1)).arrived().squeeze(-1).transpose(1, 2).neg();       // [B, h, N]
    }
    return {d_t.arrived(), d_lse, {}};
  }
};

// Key and value heads so many that every rank gets those its query heads use: as they are, or each repeated.
at::Tensor shareable(const at::Tensor& t, std::int64_t heads, std::int64_t sequence_size) {
  const std::int64_t own = t.size(2);
  if (own % sequence_size == 0) return t;
  return t.repeat_interleave(sequence_size % own == 0 ? sequence_size / own : heads / own, 2);
}

// [B, n, H|K, D] each: one all-to-all for all that have the same dtype, because a message costs more than its bytes.
std::vector<at::Tensor> all_to_heads(const Group& group, const std::vector<at::Tensor>& given, std::int64_t heads) {
  const std::int64_t sequence_size = group.size();
  std::vector<at::Tensor> out(given.size()), together;
  std::vector<std::size_t> places;
  std::vector<std::int64_t> widths;
  for (std::size_t i = 0; i < given.size(); ++i) {
    if (!given[i].defined()) continue;
    const at::Tensor t = shareable(given[i], heads, sequence_size);
    if (t.scalar_type() != given[0].scalar_type()) {
      out[i] = ToHeads::apply(t, &group);
      continue;
    }
    places.push_back(i);
    widths.push_back(t.size(2) / sequence_size);
    together.push_back(t.unflatten(2, {sequence_size, widths.back()}));  // [B, n, S, h, D]
  }
  const std::vector<at::Tensor> split =
      ToHeads::apply(at::cat(together, 3).flatten(2, 3), &group).split_with_sizes(widths, 2);
  for (std::size_t i = 0; i < places.size(); ++i) out[places[i]] = split[i];
  return out;
}

}  // namespace

void ulysses(Parallel& parallel, const Group& group, const ModelConfig& config) {
  if (group.size() == 1) return;
  if (config.heads % group.size() != 0) {
    fail("train", "sequence_parallel {} does not divide the model's {} heads; set it to a divisor.", group.size(),
         config.heads);
  }
  parallel.sequence_rank = group.rank();
  parallel.sequence_size = group.size();
  parallel.to_heads = [group, heads = config.heads](const std::vector<at::Tensor>& all) {
    return all_to_heads(group, all, heads);
  };
  parallel.to_tokens = [group](const at::Tensor& t, const at::Tensor& lse) {
    return ToTokens::apply(t, lse.defined() ? std::optional(lse) : std::nullopt, &group);
  };
}

}  // namespace tapetune
