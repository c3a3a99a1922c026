#include "distributed/sequence.h"

#include "core/error.h"

namespace tapetune {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

struct Holder : torch::CustomClassHolder {
  explicit Holder(Group given) : group(std::move(given)) {}
  Group group;
};

at::Tensor exchanged(const Group& group, const at::Tensor& rows) {
  const at::Tensor from = rows.contiguous();
  at::Tensor to = at::empty_like(from);
  group.exchange(to, from).wait();
  return to;
}

// [B, n, S h, D] -> [B, S n, h, D]: the other ranks' tokens come, the other ranks' heads go.
at::Tensor tokens_in(const Group& group, const at::Tensor& t) {
  const std::int64_t parts = group.size(), batch = t.size(0), n = t.size(1), h = t.size(2) / parts, width = t.size(3);
  const at::Tensor by_rank = t.reshape({batch, n, parts, h, width}).permute({2, 0, 1, 3, 4});  // [S, B, n, h, D]
  return exchanged(group, by_rank).permute({1, 0, 2, 3, 4}).reshape({batch, parts * n, h, width});
}

// The way back.
at::Tensor heads_in(const Group& group, const at::Tensor& t) {
  const std::int64_t parts = group.size(), batch = t.size(0), n = t.size(1) / parts, h = t.size(2), width = t.size(3);
  const at::Tensor by_rank = t.reshape({batch, parts, n, h, width}).permute({1, 0, 2, 3, 4});  // [S, B, n, h, D]
  return exchanged(group, by_rank).permute({1, 2, 0, 3, 4}).reshape({batch, n, parts * h, width});
}

// Each is the other's gradient.
template <bool to_heads>
struct Exchange : Function<Exchange<to_heads>> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& t, const Group* group) {
    ctx->saved_data["group"] = c10::IValue::make_capsule(c10::make_intrusive<Holder>(*group));
    return to_heads ? tokens_in(*group, t) : heads_in(*group, t);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Group& group = c10::static_intrusive_pointer_cast<Holder>(ctx->saved_data["group"].toCapsule())->group;
    return {to_heads ? heads_in(group, grads[0]) : tokens_in(group, grads[0]), {}};
  }
};

// Key and value heads so many that every rank gets those its query heads use: as they are, or each repeated.
at::Tensor shareable(const at::Tensor& t, std::int64_t heads, std::int64_t parts) {
  const std::int64_t own = t.size(2);
  if (own % parts == 0) return t;
  return t.repeat_interleave(parts % own == 0 ? parts / own : heads / own, 2);
}

// [B, n, H|K, D] each: one exchange for all that have the same dtype, because a message costs more than its bytes.
std::vector<at::Tensor> all_to_heads(const Group& group, const std::vector<at::Tensor>& given, std::int64_t heads) {
  const std::int64_t parts = group.size();
  std::vector<at::Tensor> out(given.size()), together;
  std::vector<std::size_t> places;
  std::vector<std::int64_t> widths;
  for (std::size_t i = 0; i < given.size(); ++i) {
    if (!given[i].defined()) continue;
    const at::Tensor t = shareable(given[i], heads, parts);
    if (t.scalar_type() != given[0].scalar_type()) {
      out[i] = Exchange<true>::apply(t, &group);
      continue;
    }
    places.push_back(i);
    widths.push_back(t.size(2) / parts);
    together.push_back(t.unflatten(2, {parts, widths.back()}));  // [B, n, S, h, D]
  }
  const std::vector<at::Tensor> split =
      Exchange<true>::apply(at::cat(together, 3).flatten(2, 3), &group).split_with_sizes(widths, 2);
  for (std::size_t i = 0; i < places.size(); ++i) out[places[i]] = split[i];
  return out;
}

}  // namespace

void spread_sequences(Parallel& parallel, const Group& group, const ModelConfig& config) {
  if (group.size() == 1) return;
  if (config.heads % group.size() != 0) {
    fail("train", "sequence_parallel {} does not divide the model's {} heads; take a divisor of them.", group.size(),
         config.heads);
  }
  parallel.part = group.rank();
  parallel.parts = group.size();
  parallel.to_heads = [group, heads = config.heads](const std::vector<at::Tensor>& all) {
    return all_to_heads(group, all, heads);
  };
  parallel.to_tokens = [group](const at::Tensor& t) { return Exchange<false>::apply(t, &group); };
}

}  // namespace tapetune
