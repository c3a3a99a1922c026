// FSDP-style sharding of frozen weights: every process holds one shard of a layer, and all of it while it is used.
#pragma once

#include "distributed/group.h"
#include "model/parallel.h"

namespace tapetune {

// Shards the frozen matrices of `weights` over the group, copies the own shard and lets go of the rest: of a mapped
// checkpoint only that shard is ever read. `parallel` all-gathers them, the next layer's while one computes.
// What trains, and norms, stay whole. All of it is then on `device`.
void shard_base(LlamaWeights& weights, const Group& group, Parallel& parallel, at::Device device = at::kCPU);

}  // namespace tapetune
