// AdamW over a model's trained parameters, with its state in f32.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <span>
#include <string>
#include <vector>

#include "adapters/adapter.h"

namespace tapetune {

struct AdamWOptions {
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.0;
};

class AdamW {
 public:
  AdamW(std::span<const Parameter> parameters, AdamWOptions options);

  // Parameters without a gradient stay as they are and do not count a step.
  void step(double rate);

  // The global norm of all gradients; `limit` above 0 scales them down to it.
  double clip(double limit);

  // Moments and step counts under the parameters' names, for a checkpoint and back.
  std::map<std::string, at::Tensor> state() const;
  void restore(const std::map<std::string, at::Tensor>& state);

 private:
  std::vector<Parameter> parameters_;
  std::vector<at::Tensor> mean_, square_,
      steps_;  // a parameter each; steps are scalars, as the fused kernel wants them
  AdamWOptions options_;
};

}  // namespace tapetune
