// Activation checkpointing: a computation whose activations are not kept. Its forward runs without a graph, its
// backward runs it again with one.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace tapetune {

// inputs: as given to `recomputed`; again: for the gradients. Called twice, it must compute the same.
using Recompute = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& inputs, bool again)>;

// inputs may hold undefined tensors. trained: every other tensor that wants a gradient from this computation.
std::vector<at::Tensor> recomputed(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& trained,
                                   const Recompute& run);

}  // namespace tapetune
