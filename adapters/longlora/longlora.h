// LongLoRA (arXiv 2309.12307): LoRA, and while training attention within groups of tokens, shifted by half a group for
// half of the heads. Evaluation attends to everything.
#pragma once

#include "adapters/adapter.h"

namespace tapetune {

void make_longlora(ModelBuilder& model);

}  // namespace tapetune
