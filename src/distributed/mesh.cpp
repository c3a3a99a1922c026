#include "distributed/mesh.h"

#include <ATen/ops/tensor.h>

#include "core/error.h"
#include "distributed/world.h"

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

ProcessMesh make_process_mesh(World& world, const Recipe& recipe) {
  ProcessMesh mesh;
  mesh.share = share_batch(recipe, world.size());
  mesh.data_parallel_rank = world.rank() / static_cast<int>(recipe.sequence_parallel);
  mesh.device = world.device();
  mesh.gradients = world.group("gradients");
  if (recipe.shard == "base") mesh.base = world.group("base");
  if (recipe.sequence_parallel > 1) mesh.sequence = world.group("sequence", mesh.data_parallel_rank);
  return mesh;
}

ProcessMesh::Sum ProcessMesh::all_reduce(double value, bool flag) const {
  if (gradients.size() == 1) return {value, flag};
  const at::Tensor both = at::tensor({value, flag ? 1.0 : 0.0}, at::kDouble).to(device);
  gradients.all_reduce(both).wait();
  return {both[0].item<double>(), both[1].item<double>() > 0};
}

std::uint64_t ProcessMesh::bytes_sent() const {
  return gradients.bytes_sent() + base.bytes_sent() + sequence.bytes_sent();
}

}  // namespace tapetune
