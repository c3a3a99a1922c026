// Sequence parallelism (DeepSpeed-Ulysses, arXiv 2309.14509): each process holds a part of a sequence's tokens, and for
// attention all tokens of a part of the heads.
#pragma once

#include "distributed/group.h"
#include "model/parallel.h"

namespace tapetune {

// Fails where the model's heads cannot be divided evenly.
void ulysses(Parallel& parallel, const Group& group, const ModelConfig& config);

}  // namespace tapetune
