// The checkpoints of a run: what they hold, saving one and resuming from the last.
#pragma once

#include <cstdint>

#include "train/setup.h"

namespace tapetune {

// Where a run is, beside its parameters and the optimizer's state.
struct TrainProgress {
  std::int64_t step = 0;       // done
  double loss = 0;             // of the last one
  std::int64_t evaluated = 0;  // the last step that was, if any is
  std::int64_t metrics_bytes = 0, events_bytes = 0;
};

// Rank 0 reads the last undamaged checkpoint, and the others get it from there; at step 0 where there is none.
TrainProgress resume(TrainSetup& setup);

// All ranks call it, because they share the optimizer's state; rank 0 writes.
void save_checkpoint(TrainSetup& setup, const TrainProgress& at);

}  // namespace tapetune
