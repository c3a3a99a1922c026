// Whole checkpoints that hold TAPE's tensors beside Llama's, under the authors' names: what their training saves, and
// what a merge writes.
#pragma once

#include "adapters/options.h"
#include "checkpoint/checkpoint.h"

namespace tapetune {

extern const StoredEncoding stored_tape;

// What config.json says, and where it says nothing, what the authors' code does: each channel takes its own head.
MethodOptions tape_options(const Checkpoint& checkpoint);

}  // namespace tapetune
