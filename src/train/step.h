// One step of training, and one evaluation of the held-out data.
#pragma once

#include <cstdint>
#include <functional>

#include "train/setup.h"

namespace tapetune {

struct StepResult {
  double loss = 0;             // the mean over all tokens of the batch
  double gradient_norm = 0;    // before it is clipped
  bool asked_to_stop = false;  // a rank was
};

// Step number `step` (from 0 on) on this rank's share of the batch: windows, forward, loss, backward with the
// all-reduce of gradients, clip, AdamW. Fails where loss or gradients are NaN or Inf, and changes no parameter then.
// `complete` is called between the gradients and the update; what it throws drops the step.
StepResult train_step(TrainSetup& setup, std::int64_t step, double lr, const std::function<void()>& complete);

// The mean loss over the held-out windows.
double held_out_loss(const TrainSetup& setup);

}  // namespace tapetune
