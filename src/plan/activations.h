// The memory of a step beyond weights and what trains: what the forward keeps for the backward, and what exists for a
// moment.
#pragma once

#include <cstdint>

#include "adapters/build_model.h"

namespace tapetune {

struct StepMemory {
  double activations = 0;  // bytes, at the moment when they are most
  double loss = 0;         // what the blocks of logits add to that moment
  double moment = 0;       // of the activations, those that come and go with each layer
};

StepMemory step_memory(const AdaptedModel& adapted, std::int64_t rows, std::int64_t tokens,
                       Checkpointing checkpointing);

}  // namespace tapetune
