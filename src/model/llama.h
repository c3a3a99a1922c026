// Llama: embedding, decoder layers, final norm, head. Knows no method; `Components` is where one acts.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "model/attention.h"
#include "model/components.h"
#include "model/parallel.h"

namespace tapetune {

using WatchAttention = std::function<void(const AttentionInput& in)>;

struct ForwardInput {
  at::Tensor tokens;           // [B, N] int64; with sequence parallelism, this rank's part of them
  at::Tensor positions;        // [B|1, N] int64; undefined: counted from each row's first token, behind its cache
  std::vector<RowSpan> spans;  // the tokens of each row where rows are padded; empty: all of them
  std::vector<SequenceCache*> caches;  // one a row; empty: none
  std::int64_t planned_length = 0;     // for rotary variants that depend on it; 0: the largest position + 1
  bool all_hidden = false;
  bool all_positions = false;
  WatchAttention watch;              // gets every layer's queries, keys and scores; empty: nobody does
  std::optional<Training> training;  // whole sequences only: no padding, no cache
};

struct ForwardOutput {
  at::Tensor last;                    // [B, N, hidden], after the final norm
  std::vector<at::Tensor> hidden;     // on request: the input of every layer, then `last`
  std::vector<at::Tensor> positions;  // on request: the position state that every layer uses, [B|1, N, C, D]
};

class Llama {
 public:
  // dtype: of the activations; the weights stay as they are stored.
  Llama(ModelConfig config, LlamaWeights weights, at::ScalarType dtype, Components components = {});
  static Llama open(const Checkpoint& checkpoint, at::ScalarType dtype, at::Device device = at::kCPU);

  ForwardOutput forward(const ForwardInput& in) const;
  at::Tensor logits(const at::Tensor& hidden,
                    const Training* training = nullptr) const;  // [..., hidden] -> [..., vocab]

  const ModelConfig& config() const { return config_; }
  const LlamaWeights& weights() const { return weights_; }
  const Components& components() const { return components_; }
  at::ScalarType dtype() const { return dtype_; }
  // The longest sequence that it is meant for, where that is known better than by its config.
  void set_context(std::int64_t context) { config_.context = context; }
  SequenceCache make_cache(std::int64_t capacity) const;
  // The trainable tensors that a layer uses.
  std::vector<at::Tensor> trained_in(std::int64_t layer) const;
  // Of these, what components brought; layer: the number of layers for the head.
  const std::vector<at::Tensor>& added_in(std::int64_t layer) const;

  // From here on computed together with other processes; weights that `parallel` brings may be absent.
  void share(LlamaWeights weights, Parallel parallel);
  const Parallel& parallel() const { return parallel_; }
  Linear head() const { return parallel_.head ? parallel_.head() : weights_.head; }

 private:
  ModelConfig config_;
  LlamaWeights weights_;
  at::ScalarType dtype_;
  Components components_;
  std::vector<std::vector<at::Tensor>> added_;  // by layer; the last: by the head
  Parallel parallel_;
};

// The dtype to compute in by default: the checkpoint's, or f32 where the CPU is slow at it.
at::ScalarType default_dtype(const Checkpoint& checkpoint, at::Device device = at::kCPU);

}  // namespace tapetune
