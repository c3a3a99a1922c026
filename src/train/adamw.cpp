#include "train/adamw.h"

#include "checkpoint/finite.h"
#include "core/error.h"

namespace tapetune {

namespace {

at::Tensor flat_part(const at::Tensor& t, std::int64_t begin, std::int64_t count) {
  return t.detach().view({-1}).narrow(0, begin, count);
}

}  // namespace

template <typename Use>
void AdamW::for_range(std::int64_t begin, std::int64_t end, const Use& use) const {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const std::int64_t from = std::max(begin, starts_[i]), to = std::min(end, starts_[i + 1]);
    if (from < to) use(i, from - starts_[i], to - from, from - begin);
  }
}

AdamW::AdamW(std::span<const Parameter> parameters, AdamWOptions options, Group group)
    : parameters_(parameters.begin(), parameters.end()), options_(options), group_(std::move(group)) {
  starts_.push_back(0);
  for (const Parameter& p : parameters_) {
    starts_.push_back(starts_.back() + p.value.numel());
    steps_.push_back(at::zeros({}, p.value.options().dtype(at::kFloat).requires_grad(false)));
  }
  each_ = (starts_.back() + group_.size() - 1) / group_.size();
  for_range(each_ * group_.rank(), each_ * (group_.rank() + 1),
            [&](std::size_t i, std::int64_t begin, std::int64_t count, std::int64_t) {
              const auto zeros = at::zeros({count}, parameters_[i].value.options().requires_grad(false));
              shares_.push_back({i, begin, count, zeros, zeros.clone()});
            });
}

void AdamW::step(double rate) {
  const c10::NoGradGuard updating;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].value.grad().defined()) steps_[i].add_(1);
  }
  std::vector<at::Tensor> values, grads, means, squares, steps;
  for (const Share& share : shares_) {
    const at::Tensor& value = parameters_[share.parameter].value;
    if (!value.grad().defined()) continue;
    values.push_back(flat_part(value, share.begin, share.count));
    grads.push_back(flat_part(value.grad().contiguous(), share.begin, share.count));
    means.push_back(share.mean);
    squares.push_back(share.square);
    steps.push_back(steps_[share.parameter]);
  }
  if (!values.empty()) {
    at::_fused_adamw_(values, grads, means, squares, /*max_exp_avg_sqs=*/{}, steps, rate, options_.beta1,
                      options_.beta2, options_.weight_decay, options_.eps, /*amsgrad=*/false, /*maximize=*/false);
  }
  gather_values();
}

void AdamW::gather_values() const {
  if (group_.size() == 1) return;
  constexpr std::int64_t block = std::int64_t{1} << 22;  // 16 MB from each: memory that does not grow with the model
  const auto options = parameters_.front().value.options().requires_grad(false);
  for (std::int64_t at = 0; at < each_; at += block) {
    const std::int64_t count = std::min(block, each_ - at);
    const at::Tensor own = at::zeros({count}, options), all = at::empty({group_.size() * count}, options);
    const auto range = [&](std::int64_t rank, const auto& use) {
      for_range(rank * each_ + at, std::min(rank * each_ + at + count, (rank + 1) * each_), use);
    };
    range(group_.rank(), [&](std::size_t i, std::int64_t begin, std::int64_t n, std::int64_t place) {
      own.narrow(0, place, n).copy_(flat_part(parameters_[i].value, begin, n));
    });
    group_.all_gather(all, own).wait();
    for (std::int64_t r = 0; r < group_.size(); ++r) {
      if (r == group_.rank()) continue;
      range(r, [&](std::size_t i, std::int64_t begin, std::int64_t n, std::int64_t place) {
        flat_part(parameters_[i].value, begin, n).copy_(all.narrow(0, r * count + place, n));
      });
    }
  }
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

std::string AdamW::first_not_finite() const {
  const auto bad = [](const Share& share) { return !all_finite(share.mean) || !all_finite(share.square); };
  const auto found = std::find_if(shares_.begin(), shares_.end(), bad);
  return found == shares_.end() ? "" : parameters_[found->parameter].name;
}

std::map<std::string, at::Tensor> AdamW::state() const {
  std::map<std::string, at::Tensor> all;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const std::string& name = parameters_[i].name;
    const at::Tensor& value = parameters_[i].value;
    const auto whole = [&](at::Tensor Share::* moment) {
      if (group_.size() == 1) {  // it is: no copy, which would be as large as all moments
        const auto own = [i](const Share& share) { return share.parameter == i; };
        return ((*std::find_if(shares_.begin(), shares_.end(), own)).*moment).view(value.sizes());
      }
      at::Tensor out = at::zeros(value.sizes(), value.options().requires_grad(false));
      for (const Share& share : shares_) {
        if (share.parameter == i) flat_part(out, share.begin, share.count).copy_(share.*moment);
      }
      // What a process has no share of is zero there, so that the sum is the whole.
      group_.all_reduce(out).wait();
      return out;
    };
    const at::Tensor mean = whole(&Share::mean), square = whole(&Share::square);
    if (group_.rank() != 0) continue;
    all["mean." + name] = mean;
    all["square." + name] = square;
    all["steps." + name] = steps_[i];
  }
  return all;
}

void AdamW::restore(const std::map<std::string, at::Tensor>& state, const Group& group) {
  const auto take = [&](const std::string& name, at::Tensor whole) {
    if (group.rank() == 0) {
      const auto found = state.find(name);
      if (found == state.end() || found->second.sizes() != whole.sizes()) {
        fail("train", "the optimizer state has no {} of the right shape; was it saved with this recipe?", name);
      }
      whole.copy_(found->second);
    }
    group.broadcast(whole).wait();
    return whole;
  };
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const std::string& name = parameters_[i].name;
    const at::Tensor& value = parameters_[i].value;
    const auto room = [&] { return at::empty(value.sizes(), value.options().requires_grad(false)); };
    const at::Tensor mean = take("mean." + name, room()), square = take("square." + name, room());
    take("steps." + name, steps_[i]);
    for (const Share& share : shares_) {
      if (share.parameter != i) continue;
      share.mean.copy_(flat_part(mean, share.begin, share.count));
      share.square.copy_(flat_part(square, share.begin, share.count));
    }
  }
}

}  // namespace tapetune
