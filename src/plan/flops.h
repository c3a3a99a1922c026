// The arithmetic of a training step, counted.
#pragma once

#include <cstdint>

#include "adapters/adapter.h"

namespace tapetune {

struct StepFlops {
  double layer = 0;  // of a layer in the middle: all but the last update positions where the method does
  double rest = 0;   // the last layer, and the head
  double total(std::int64_t layers) const { return layer * static_cast<double>(layers - 1) + rest; }
};

// Multiplications and additions of the matrix products and of attention, forward and backward, for one sequence;
// `recomputed` counts the forward once more where checkpointing runs it again. The tensors may be without memory.
StepFlops step_flops(const AdaptedModel& adapted, std::int64_t tokens, Checkpointing recomputed = Checkpointing::off);

}  // namespace tapetune
