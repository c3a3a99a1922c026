// One sequence over several processes (Ulysses): each holds a part of the tokens, and for attention all tokens of a
// part of the heads.
#pragma once

#include "distributed/group.h"
#include "model/parallel.h"

namespace tapetune {

// Fails where the model's heads cannot be shared evenly.
void spread_sequences(Parallel& parallel, const Group& group, const ModelConfig& config);

}  // namespace tapetune
