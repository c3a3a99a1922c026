#include "train/adamw.h"

#include "core/error.h"

namespace tapetune {

AdamW::AdamW(std::span<const Parameter> parameters, AdamWOptions options)
    : parameters_(parameters.begin(), parameters.end()), options_(options) {
  for (const Parameter& p : parameters_) {
    mean_.push_back(at::zeros_like(p.value, p.value.options().requires_grad(false)));
    square_.push_back(at::zeros_like(p.value, p.value.options().requires_grad(false)));
    steps_.push_back(at::zeros({}, p.value.options().dtype(at::kFloat).requires_grad(false)));
  }
}

void AdamW::step(double rate) {
  const c10::NoGradGuard updating;
  std::vector<at::Tensor> values, grads, means, squares, steps;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& value = parameters_[i].value;
    if (!value.grad().defined()) continue;
    values.push_back(value);
    grads.push_back(value.grad());
    means.push_back(mean_[i]);
    squares.push_back(square_[i]);
    steps.push_back(steps_[i].add_(1));
  }
  if (values.empty()) return;
  at::_fused_adamw_(values, grads, means, squares, /*max_exp_avg_sqs=*/{}, steps, rate, options_.beta1, options_.beta2,
                    options_.weight_decay, options_.eps, /*amsgrad=*/false, /*maximize=*/false);
}

double AdamW::clip(double limit) {
  const c10::NoGradGuard measuring;
  double squares = 0;
  for (const Parameter& p : parameters_) {
    if (p.value.grad().defined()) {
      const double norm = at::linalg_vector_norm(p.value.grad(), 2).item<double>();
      squares += norm * norm;
    }
  }
  const double norm = std::sqrt(squares);
  if (limit > 0 && norm > limit) {
    for (const Parameter& p : parameters_) {
      if (p.value.grad().defined()) p.value.mutable_grad().mul_(limit / (norm + 1e-6));
    }
  }
  return norm;
}

std::map<std::string, at::Tensor> AdamW::state() const {
  std::map<std::string, at::Tensor> all;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    all["mean." + parameters_[i].name] = mean_[i];
    all["square." + parameters_[i].name] = square_[i];
    all["steps." + parameters_[i].name] = steps_[i];
  }
  return all;
}

void AdamW::restore(const std::map<std::string, at::Tensor>& state) {
  const auto take = [&](const std::string& name, at::Tensor& to) {
    const auto found = state.find(name);
    if (found == state.end() || found->second.sizes() != to.sizes()) {
      fail("train", "the optimiser's state has no {} of the right shape; was it saved by this recipe?", name);
    }
    to.copy_(found->second);
  };
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    take("mean." + parameters_[i].name, mean_[i]);
    take("square." + parameters_[i].name, square_[i]);
    take("steps." + parameters_[i].name, steps_[i]);
  }
}

}  // namespace tapetune
