// The arithmetic of a training step, counted.
#pragma once

#include <cstdint>
#include <numeric>
#include <vector>

#include "adapters/build_model.h"

namespace tapetune {

struct StepFlops {
  std::vector<double> layers;
  double head = 0;
  // The last `count` layers and the head.
  double total(std::int64_t count) const { return std::accumulate(layers.end() - count, layers.end(), head); }
};

// The first layer that gradients reach: nothing in the layers before it is trainable.
std::int64_t first_trained_layer(const Llama& model);

// Multiplications and additions of the matrix products and of attention, forward and backward, for one sequence;
// `recomputed` counts the forward once more where checkpointing runs it again. The tensors may be without memory.
StepFlops step_flops(const AdaptedModel& adapted, std::int64_t tokens, Checkpointing recomputed = Checkpointing::off);

}  // namespace tapetune
