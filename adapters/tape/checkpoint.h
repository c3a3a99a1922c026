// Whole checkpoints that hold TAPE's tensors beside Llama's, under the authors' names: what their training saves, and
// what a merge writes.
#pragma once

#include <string_view>

#include "adapters/options.h"
#include "checkpoint/checkpoint.h"

namespace tapetune {

bool is_position_tensor(std::string_view name);
bool holds_positions(const StoredTensors& tensors);

// What config.json says, and where it says nothing, what the authors' code does: each channel takes its own head.
MethodOptions position_options(const Checkpoint& checkpoint);

}  // namespace tapetune
