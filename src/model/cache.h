// Keys and values of one sequence, preallocated to the length that it may reach.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "checkpoint/config.h"

namespace tapetune {

// Every sequence has its own: rows of a batch then need no padding and may end at different times.
class SequenceCache {
 public:
  // with_positions: also the position state, for a model that changes it from layer to layer.
  SequenceCache(const ModelConfig& config, std::int64_t capacity, const at::TensorOptions& options,
                bool with_positions = false);

  std::int64_t length() const { return length_; }
  std::int64_t capacity() const { return capacity_; }

  struct View {
    at::Tensor k, v;      // [K, length + N, D]
    at::Tensor position;  // the same, or undefined
  };
  // Stores the next N tokens of a layer, [K, N, D] each, and gives all of the layer so far.
  View append(std::int64_t layer, const View& next);
  // Called once all layers have stored their part of N tokens.
  void advance(std::int64_t tokens) { length_ += tokens; }
  // Forgets all tokens but the first ones, so that another text can go on from there.
  void truncate(std::int64_t tokens);

 private:
  std::vector<View> layers_;  // [K, capacity, D]
  std::int64_t capacity_;
  std::int64_t length_ = 0;
};

}  // namespace tapetune
