// How ranks share a recipe's batch, as a mesh of two dimensions: `sequence_parallel` neighbouring ranks share each
// sequence, and data parallelism runs over the groups of such ranks.
#pragma once

#include <cstdint>

#include "recipe/recipe.h"

namespace tapetune {

struct BatchShare {
  std::int64_t data_parallel_size = 1;  // groups of ranks that share a sequence
  std::int64_t sequences = 1;           // of such a group in a step
  std::int64_t passes = 1;              // micro-batches in which it computes them
  std::int64_t micro_batch = 1;         // sequences of the largest one: the recipe's, or fewer
};

// Fails where batch, context or sequence_parallel do not fit this many ranks. The recipe's micro_batch is a limit.
BatchShare share_batch(const Recipe& recipe, std::int64_t ranks);

}  // namespace tapetune
