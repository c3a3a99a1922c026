// How ranks share a recipe's batch, as a mesh of two dimensions: `sequence_parallel` neighbouring ranks share each
// sequence, and data parallelism runs over the groups of such ranks.
#pragma once

#include <cstdint>

#include "distributed/group.h"
#include "recipe/recipe.h"

namespace tapetune {

class World;

struct BatchShare {
  std::int64_t data_parallel_size = 1;  // groups of ranks that share a sequence
  std::int64_t sequences = 1;           // of such a group in a step
  std::int64_t passes = 1;              // micro-batches in which it computes them
  std::int64_t micro_batch = 1;         // sequences of the largest one: the recipe's, or fewer
};

// Fails where batch, context or sequence_parallel do not fit this many ranks. The recipe's micro_batch is a limit.
BatchShare share_batch(const Recipe& recipe, std::int64_t ranks);

// Which rank computes what, and with whom this one exchanges.
struct ProcessMesh {
  BatchShare share;
  int data_parallel_rank = 0;  // of this rank's group among those that share a sequence
  at::Device device = at::kCPU;
  Group gradients;  // all ranks
  Group base;       // all ranks where they shard the base; else this one alone
  Group sequence;   // those that share a sequence

  struct Sum {
    double value = 0;
    bool any = false;
  };
  // The sum of a number over all ranks, and whether the flag is set on any of them.
  Sum all_reduce(double value, bool flag = false) const;

  // By this rank, in all groups.
  std::uint64_t bytes_sent() const;
};

// All ranks of the world call it.
ProcessMesh make_process_mesh(World& world, const Recipe& recipe);

}  // namespace tapetune
