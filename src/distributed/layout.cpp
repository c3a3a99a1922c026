#include "distributed/layout.h"

#include "core/error.h"

namespace tapetune {

std::int64_t teams_of(const Recipe& recipe, std::int64_t ranks) {
  const std::int64_t parts = recipe.sequence_parallel, teams = ranks / parts;
  if (ranks % parts != 0) {
    fail("train", "sequence_parallel {} does not divide the {} rank{} there are; start a multiple of it.", parts, ranks,
         ranks == 1 ? "" : "s");
  }
  if (recipe.context % parts != 0) {
    fail("train", "sequence_parallel {} does not divide a context of {}; take a divisor.", parts, recipe.context);
  }
  if (recipe.batch / recipe.micro_batch % teams != 0) {
    fail("train",
         "a batch of {} in micro-batches of {} cannot be shared by {} ranks; batch must be a multiple of micro_batch x "
         "{}: change one of them, or set sequence_parallel.",
         recipe.batch, recipe.micro_batch, teams, teams);
  }
  return teams;
}

}  // namespace tapetune
