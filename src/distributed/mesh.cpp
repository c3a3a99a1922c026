#include "distributed/mesh.h"

#include "core/error.h"

namespace tapetune {

BatchShare share_batch(const Recipe& recipe, std::int64_t ranks) {
  const std::int64_t sequence_size = recipe.sequence_parallel, data_parallel_size = ranks / sequence_size;
  if (ranks % sequence_size != 0) {
    fail("train", "sequence_parallel {} does not divide the number of ranks, {}; start a multiple of it.",
         sequence_size, ranks);
  }
  if (recipe.context % sequence_size != 0) {
    fail("train", "sequence_parallel {} does not divide context {}; set it to a divisor.", sequence_size,
         recipe.context);
  }
  if (recipe.batch % data_parallel_size != 0) {
    fail("train", "batch {} cannot be shared by {} ranks; set batch to a multiple of {}, or set sequence_parallel.",
         recipe.batch, data_parallel_size, data_parallel_size);
  }
  BatchShare share;
  share.data_parallel_size = data_parallel_size;
  share.sequences = recipe.batch / data_parallel_size;
  const auto divided = [](std::int64_t a, std::int64_t b) { return (a + b - 1) / b; };
  share.passes = divided(share.sequences, recipe.micro_batch);
  share.micro_batch = divided(share.sequences, share.passes);
  return share;
}

}  // namespace tapetune
