// One decoder layer: attention and MLP, each behind a norm and beside a residual, and the update of positions.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

#include "model/llama.h"

namespace tapetune {

struct LayerState {
  at::Tensor x;  // [B, N, hidden]
  PositionState position;
};

// What all layers of one forward share.
struct Pass {
  std::int64_t batch, length;
  std::span<const RowSpan> spans;
  std::span<SequenceCache* const> caches;
  kernels::Visible visible = {};
  std::int64_t longest = 0;               // sequence, with its past and the tokens of all processes
  const WatchAttention* watch = nullptr;  // in evaluation
  const Training* training = nullptr;
  bool keep_input = false;          // somebody holds on to a layer's input
  SavedAttention* saved = nullptr;  // of this layer
  bool gradients_only = false;      // a layer is recomputed for its gradients; its output is known
};

LayerState decoder_layer(const Llama& model, std::int64_t index, const LayerState& in, const Pass& pass);

// The same without keeping its activations.
LayerState checkpointed_layer(const Llama& model, std::int64_t index, const LayerState& in, const Pass& pass);

}  // namespace tapetune
