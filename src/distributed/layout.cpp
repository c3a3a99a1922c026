#include "distributed/layout.h"

#include "core/error.h"

namespace tapetune {

BatchShare share_batch(const Recipe& recipe, std::int64_t ranks) {
  const std::int64_t parts = recipe.sequence_parallel, teams = ranks / parts;
  if (ranks % parts != 0) {
    fail("train", "sequence_parallel {} does not divide the number of ranks, {}; start a multiple of it.", parts,
         ranks);
  }
  if (recipe.context % parts != 0) {
    fail("train", "sequence_parallel {} does not divide context {}; set it to a divisor.", parts, recipe.context);
  }
  if (recipe.batch % teams != 0) {
    fail("train", "batch {} cannot be shared by {} ranks; set batch to a multiple of {}, or set sequence_parallel.",
         recipe.batch, teams, teams);
  }
  BatchShare share;
  share.teams = teams;
  share.sequences = recipe.batch / teams;
  const auto divided = [](std::int64_t a, std::int64_t b) { return (a + b - 1) / b; };
  share.passes = divided(share.sequences, recipe.micro_batch);
  share.micro_batch = divided(share.sequences, share.passes);
  return share;
}

}  // namespace tapetune
