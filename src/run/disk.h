// What a run writes to its disk.
#pragma once

#include "adapters/build_model.h"
#include "recipe/recipe.h"

namespace tapetune {

struct RunDisk {
  double adapter = 0;     // bytes of the result, a tied matrix under both names that PEFT asks for
  double checkpoint = 0;  // of one: the adapter and AdamW's two moments
  double most = 0;        // at any time: a new checkpoint is complete before the oldest goes
};

RunDisk run_disk(const AdaptedModel& adapted, const Recipe& recipe);

// Warns where the disk of the run folder has less left than the run will still need.
void warn_of_small_disk(const RunDisk& disk, const Recipe& recipe);

}  // namespace tapetune
