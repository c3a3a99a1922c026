// Frozen weights of which every process holds one part, and all of a layer while it is used.
#pragma once

#include "distributed/group.h"
#include "model/parallel.h"

namespace tapetune {

// Cuts the frozen matrices of `weights` into the group's parts, copies the own one and lets go of the rest: of a mapped
// checkpoint only that part is ever read. They come together through `parallel`, the next layer's while one computes.
// What trains, and norms, stay whole. All of it is then on `device`.
void shard_base(LlamaWeights& weights, const Group& group, Parallel& parallel, at::Device device = at::kCPU);

}  // namespace tapetune
