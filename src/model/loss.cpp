#include "model/loss.h"

#include <ATen/Parallel.h>

#include "core/error.h"
#include "kernels/cpu/loops.h"
#include "kernels/grain.h"
#include "kernels/pointwise.h"

namespace tapetune {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

at::ScalarType precise_dtype(const at::Tensor& x) { return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

void check_targets(const at::Tensor& targets, std::int64_t vocab) {
  if (targets.numel() == 0) fail("loss", "there is no target; a text needs two tokens at least.");
  const auto largest = targets.max().item<std::int64_t>();
  if (largest >= vocab) {
    fail("loss", "token id {} is out of range: the vocabulary has {} tokens (0 to {}).", largest, vocab, vocab - 1);
  }
}

// Calls work(begin, count) for blocks of tokens with 16 M logits each: 64 MB, whatever the vocabulary.
template <typename Work>
void in_blocks(std::int64_t tokens, std::int64_t vocab, const Work& work) {
  const std::int64_t block = std::max<std::int64_t>(1, (std::int64_t{1} << 24) / vocab);
  for (std::int64_t begin = 0; begin < tokens; begin += block) work(begin, std::min(block, tokens - begin));
}

// Turns logits [R, vocab] f32 into the gradient of the summed loss and gives the loss of each row.
std::vector<double> softmax_gradients(at::Tensor& logits, const at::Tensor& targets) {
  const std::int64_t rows = logits.size(0), vocab = logits.size(1);
  const at::Tensor chosen = targets.contiguous();
  std::vector<double> losses(static_cast<std::size_t>(rows));
  auto* data = logits.mutable_data_ptr<float>();
  const auto* target = chosen.const_data_ptr<std::int64_t>();
  at::parallel_for(0, rows, kernels::grain_of(vocab), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      losses[static_cast<std::size_t>(r)] = kernels::loops::softmax_gradient(data + r * vocab, vocab, target[r]);
    }
  });
  return losses;
}

// The same for any logits, with the sum of the losses.
double softmax_gradient(at::Tensor& logits, const at::Tensor& targets) {
  if (logits.is_cpu() && logits.scalar_type() == at::kFloat && logits.is_contiguous()) {
    const std::vector<double> losses = softmax_gradients(logits, targets);
    return std::accumulate(losses.begin(), losses.end(), 0.0);
  }
  const at::Tensor counts = (targets >= 0).unsqueeze(1).to(logits.scalar_type());  // [R, 1]
  const at::Tensor column = targets.clamp_min(0).unsqueeze(1);                     // [R, 1]
  const at::Tensor normaliser = at::logsumexp(logits, 1, /*keepdim=*/true);        // [R, 1]
  const double loss = ((normaliser - logits.gather(1, column)) * counts).sum().item<double>();
  logits.sub_(normaliser).exp_().scatter_add_(1, column, -at::ones_like(column, logits.options())).mul_(counts);
  return loss;
}

// hidden weight^T, a slice of the vocabulary at a time: 17% faster here than the whole at once, whose packed weights
// leave the cache before they are used.
void logits_into(at::Tensor& logits, const at::Tensor& hidden, const at::Tensor& weight) {
  constexpr std::int64_t slice = 2048;
  for (std::int64_t begin = 0; begin < weight.size(0); begin += slice) {
    const std::int64_t count = std::min(slice, weight.size(0) - begin);
    at::Tensor to = logits.narrow(1, begin, count);
    at::mm_out(to, hidden, weight.narrow(0, begin, count).t());
  }
}

// The losses by a head as it is in the file, on the CPU in f32.
at::Tensor plain_losses(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& targets) {
  const c10::NoGradGuard evaluation;
  const at::Tensor losses = at::empty({hidden.size(0)}, at::kFloat);
  at::Tensor room;  // [block, vocab]
  in_blocks(hidden.size(0), weight.size(0), [&](std::int64_t begin, std::int64_t count) {
    if (!room.defined()) room = at::empty({count, weight.size(0)}, hidden.options());
    at::Tensor logits = room.narrow(0, 0, count);
    logits_into(logits, hidden.narrow(0, begin, count), weight);
    const std::vector<double> block = softmax_gradients(logits, targets.narrow(0, begin, count));
    std::copy(block.begin(), block.end(), losses.mutable_data_ptr<float>() + begin);
  });
  return losses;
}

// The head as it is in the file, trained or not.
struct PlainHead : Function<PlainHead> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& hidden, const at::Tensor& weight,
                            const at::Tensor& targets) {
    const auto dtype = arithmetic_dtype(hidden);
    const at::Tensor wide = weight.to(dtype), rows = hidden.to(dtype);
    at::Tensor d_hidden = at::empty(rows.sizes(), rows.options());
    // Summed over blocks, which bf16 would round each time.
    at::Tensor d_weight = weight.requires_grad() ? at::zeros_like(wide, precise_dtype(wide)) : at::Tensor();
    double loss = 0;
    at::Tensor room;
    in_blocks(rows.size(0), wide.size(0), [&](std::int64_t begin, std::int64_t count) {
      const at::Tensor part = rows.narrow(0, begin, count);
      if (!room.defined()) room = at::empty({count, wide.size(0)}, rows.options());
      at::Tensor logits = room.narrow(0, 0, count);
      logits_into(logits, part, wide);
      at::Tensor gradient = logits.to(precise_dtype(logits));
      loss += softmax_gradient(gradient, targets.narrow(0, begin, count));
      gradient = gradient.to(dtype);
      at::Tensor to = d_hidden.narrow(0, begin, count);
      at::mm_out(to, gradient, wide);
      if (d_weight.defined() && d_weight.scalar_type() == dtype) {
        d_weight.addmm_(gradient.t(), part);
      } else if (d_weight.defined()) {
        d_weight.add_(at::mm(gradient.t(), part));
      }
    });
    ctx->save_for_backward({d_hidden, d_weight});
    ctx->saved_data["dtype"] = static_cast<std::int64_t>(hidden.scalar_type());
    return at::full({}, loss, rows.options().dtype(precise_dtype(rows)));
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const auto dtype = static_cast<at::ScalarType>(ctx->saved_data["dtype"].toInt());
    return {(saved[0] * grads[0]).to(dtype), saved[1].defined() ? saved[1] * grads[0] : at::Tensor(), {}};
  }
};

// A head with something added to it: each block goes through the adapter with a small graph of its own.
struct AdaptedHead : Function<AdaptedHead> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& hidden, at::TensorList trained,
                            const at::Tensor& targets, std::int64_t length, const Llama* model,
                            const Training* training) {
    const c10::AutoGradMode with_graph(true);
    std::vector<at::Tensor> parts;
    variable_list sums(trained.size());
    double loss = 0;
    in_blocks(hidden.size(0), model->config().vocab_size, [&](std::int64_t begin, std::int64_t count) {
      const at::Tensor part = hidden.narrow(0, begin, count).detach().requires_grad_(true);
      std::optional<Training> own = training != nullptr ? std::optional(*training) : std::nullopt;
      if (own) {
        own->flat_begin = begin;
        own->flat_length = length;
      }
      const at::Tensor logits = model->logits(part, own ? &*own : nullptr);
      at::Tensor gradient = logits.detach().to(precise_dtype(logits), /*non_blocking=*/false, /*copy=*/true);
      loss += softmax_gradient(gradient, targets.narrow(0, begin, count));
      variable_list wanted{part};
      wanted.insert(wanted.end(), trained.begin(), trained.end());
      const variable_list found = torch::autograd::grad({logits}, wanted, {gradient.to(logits.scalar_type())});
      parts.push_back(found[0]);
      for (std::size_t i = 0; i < sums.size(); ++i) {
        sums[i] = sums[i].defined() ? sums[i].add_(found[i + 1]) : found[i + 1];
      }
    });
    variable_list saved{at::cat(parts)};
    saved.insert(saved.end(), sums.begin(), sums.end());
    ctx->save_for_backward(saved);
    return at::full({}, loss, hidden.options().dtype(precise_dtype(hidden)).requires_grad(false));
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list out = ctx->get_saved_variables();
    for (at::Tensor& gradient : out) gradient = (gradient * grads[0]).to(gradient.scalar_type());
    out.insert(out.end(), {{}, {}, {}, {}});
    return out;
  }
};

}  // namespace

at::Tensor token_losses(const Llama& model, const at::Tensor& hidden, const at::Tensor& given) {
  check_targets(given, model.config().vocab_size);
  const at::Tensor targets = given.to(hidden.device());
  // For few rows, a weight is better read as it is stored than widened and packed.
  constexpr std::int64_t few = 64;
  if (hidden.is_cpu() && arithmetic_dtype(hidden) == at::kFloat && hidden.size(0) >= few &&
      model.added_in(model.config().layers).empty()) {
    return plain_losses(hidden.to(at::kFloat), model.head().weight.to(at::kFloat), targets);
  }
  std::vector<at::Tensor> parts;
  in_blocks(hidden.size(0), model.config().vocab_size, [&](std::int64_t begin, std::int64_t count) {
    at::Tensor logits = model.logits(hidden.narrow(0, begin, count));
    logits = logits.to(precise_dtype(logits));  // [count, vocab]
    const at::Tensor chosen = logits.gather(1, targets.narrow(0, begin, count).unsqueeze(1)).squeeze(1);
    parts.push_back(at::logsumexp(logits, 1) - chosen);
  });
  return at::cat(parts);
}

at::Tensor loss_sum(const Llama& model, const at::Tensor& sequences, const at::Tensor& given,
                    const std::optional<Training>& training) {
  check_targets(given, model.config().vocab_size);
  const std::int64_t length = sequences.size(-2);
  const at::Tensor hidden = sequences.dim() == 3 ? sequences.flatten(0, 1) : sequences;
  const at::Tensor targets = given.flatten().to(hidden.device());
  const Linear head = model.head();
  std::vector<at::Tensor> trained = model.added_in(model.config().layers);
  if (trained.empty()) return PlainHead::apply(hidden, head.weight, targets);
  if (kernels::wants_gradient(head.weight)) trained.push_back(head.weight);
  return AdaptedHead::apply(hidden, at::TensorList(trained), targets, length, &model, training ? &*training : nullptr);
}

}  // namespace tapetune
