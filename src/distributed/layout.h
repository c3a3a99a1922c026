// How ranks share a recipe's batch: `sequence_parallel` neighbours share each sequence, and such teams share the batch.
#pragma once

#include <cstdint>

#include "recipe/recipe.h"

namespace tapetune {

// The number of teams; fails where batch, context or sequence_parallel do not fit this many ranks.
std::int64_t teams_of(const Recipe& recipe, std::int64_t ranks);

}  // namespace tapetune
