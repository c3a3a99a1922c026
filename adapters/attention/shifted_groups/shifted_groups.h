// LongLoRA's shifted sparse attention (arXiv 2309.12307): while training, attention within groups of tokens, which are
// shifted by half a group for half of the heads. Evaluation attends to everything.
#pragma once

#include "adapters/component.h"

namespace tapetune {

PatternComponent shifted_groups_component();

}  // namespace tapetune
