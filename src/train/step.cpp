#include "train/step.h"

#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cmath>

#include "core/signals.h"
#include "core/trace.h"
#include "model/loss.h"
#include "train/checks.h"

namespace tapetune {

namespace {

at::Tensor as_tensor(const std::vector<TokenIds>& rows) {
  std::vector<at::Tensor> tensors;
  tensors.reserve(rows.size());
  for (const TokenIds& row : rows) tensors.push_back(at::tensor(row, at::kLong));
  return at::stack(tensors);  // [R, context + 1]
}

// The tokens of a sequence that this rank computes.
struct OwnTokens {
  std::int64_t first, count;
  explicit OwnTokens(const TrainSetup& setup)
      : first(setup.recipe.context / setup.recipe.sequence_parallel * setup.mesh.sequence.rank()),
        count(setup.recipe.context / setup.recipe.sequence_parallel) {}
  at::Tensor inputs(const at::Tensor& rows) const { return rows.narrow(1, first, count); }
  at::Tensor targets(const at::Tensor& rows) const { return rows.narrow(1, first + 1, count); }
};

// The sum of this rank's losses, each divided by the tokens of the whole batch: gradients weigh by tokens, whatever the
// micro-batch.
double forward_backward(TrainSetup& setup, std::int64_t step) {
  const Recipe& recipe = setup.recipe;
  const BatchShare& share = setup.mesh.share;
  const OwnTokens own(setup);
  const auto tokens = static_cast<double>(recipe.batch * recipe.context);
  const std::int64_t start = share.sequences * setup.mesh.data_parallel_rank, end = start + share.sequences;
  double sum = 0;
  for (std::int64_t begin = start; begin < end; begin += share.micro_batch) {
    check_interrupted();
    std::vector<TokenIds> rows;
    for (std::int64_t r = begin; r < std::min(begin + share.micro_batch, end); ++r) {
      rows.push_back(setup.batches.window(step * recipe.batch + r));
    }
    const at::Tensor all = as_tensor(rows);
    ForwardInput in;
    in.tokens = own.inputs(all);
    in.training = Training{recipe.checkpointing, draw(recipe.seed, static_cast<std::uint64_t>(step))};
    in.training->first_sequence = begin;
    at::Tensor loss;
    {
      const trace::Span span("forward");
      const at::Tensor hidden = setup.adapted.model.forward(in).last;  // [R, N, hidden]
      loss = loss_sum(setup.adapted.model, hidden, own.targets(all), in.training) / tokens;
    }
    const trace::Span span("backward");
    if (begin + share.micro_batch >= end) {
      setup.gradients.backward(loss);
    } else {
      loss.backward();
    }
    sum += loss.item<double>();
  }
  return sum;
}

}  // namespace

StepResult train_step(TrainSetup& setup, std::int64_t step, double lr, const std::function<void()>& complete) {
  for (const Parameter& p : setup.adapted.parameters) p.value.mutable_grad().reset();
  const double own_loss = forward_backward(setup, step);
  // Several ranks agree to stop while they sum the loss.
  const ProcessMesh::Sum loss = setup.mesh.all_reduce(own_loss, setup.world.size() > 1 && interrupted());
  complete();
  const double norm = setup.optimizer.clip(setup.recipe.optimizer.clip);
  if (!std::isfinite(loss.value) || !std::isfinite(norm)) fail_not_finite(setup, step + 1, "the loss");
  const trace::Span span("optimiser");
  setup.optimizer.step(lr);
  return {loss.value, norm, loss.any};
}

double held_out_loss(const TrainSetup& setup) {
  const c10::NoGradGuard evaluation;
  const trace::Span span("evaluation");
  const Recipe& recipe = setup.recipe;
  const OwnTokens own(setup);
  const std::int64_t all = setup.batches.held_out();
  const std::int64_t count = recipe.eval_windows > 0 ? std::min(recipe.eval_windows, all) : all;
  double sum = 0;
  // All ranks run the model equally often, because they gather its weights together.
  for (std::int64_t round = 0; round < count; round += setup.mesh.share.data_parallel_size) {
    const std::int64_t i = round + setup.mesh.data_parallel_rank;
    const at::Tensor row = as_tensor({setup.batches.held_out_window(std::min(i, count - 1))});
    ForwardInput in;
    in.tokens = own.inputs(row);
    const at::Tensor hidden = setup.adapted.model.forward(in).last[0];
    const at::Tensor losses = token_losses(setup.adapted.model, hidden, own.targets(row)[0]);
    if (i < count) sum += losses.mean().item<double>();
  }
  return setup.mesh.all_reduce(sum).value /
         static_cast<double>(std::max<std::int64_t>(1, count) * recipe.sequence_parallel);
}

}  // namespace tapetune
