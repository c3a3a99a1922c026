// AdamW over a model's trained parameters, with its state in f32; a group of processes may share the state.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <span>
#include <string>
#include <vector>

#include "adapters/build_model.h"
#include "distributed/group.h"

namespace tapetune {

struct AdamWOptions {
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.0;
};

class AdamW {
 public:
  // In a group every process keeps the moments of its share of all numbers, updates those, and gets the rest from the
  // others. All of it then calls step, state and restore.
  AdamW(std::span<const Parameter> parameters, AdamWOptions options, Group group = {});

  // Parameters without a gradient stay as they are and do not count a step.
  void step(double rate);

  // The global norm of all gradients; `limit` above 0 scales them down to it.
  double clip(double limit);

  // The first parameter whose moments on this process have NaN or Inf; empty: none.
  std::string first_not_finite() const;

  // Moments and step counts under the parameters' names, for a checkpoint; whole on the group's first process, and
  // nothing on the others.
  std::map<std::string, at::Tensor> state() const;
  // The way back; `state` is the first process's, `all` those that go on together.
  void restore(const std::map<std::string, at::Tensor>& state, const Group& all = {});

 private:
  // Numbers [begin, begin + count) of a parameter that this process updates.
  struct Share {
    std::size_t parameter;
    std::int64_t begin, count;
    at::Tensor mean, square;  // [count]
  };
  void gather_values() const;
  // Calls use(parameter, begin in it, count, place behind `begin`) for what [begin, end) of all numbers covers.
  template <typename Use>
  void for_range(std::int64_t begin, std::int64_t end, const Use& use) const;

  std::vector<Parameter> parameters_;
  std::vector<std::int64_t> starts_;  // of each parameter among all numbers, and their sum
  std::vector<Share> shares_;
  std::vector<at::Tensor> steps_;  // a scalar a parameter, as the fused kernel wants them
  AdamWOptions options_;
  Group group_;
  std::int64_t each_ = 0;  // numbers of a process's share, the last one's may be fewer
};

}  // namespace tapetune
