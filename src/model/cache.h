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
  SequenceCache(const ModelConfig& config, std::int64_t capacity, const at::TensorOptions& options);

  std::int64_t length() const { return length_; }
  std::int64_t capacity() const { return capacity_; }

  struct View {
    at::Tensor k, v;  // [K, length + N, D]
  };
  // Stores the keys and values of the next N tokens of a layer and gives all of the layer so far: [K, N, D] each.
  View append(std::int64_t layer, const at::Tensor& k, const at::Tensor& v);
  // Called once all layers have stored their part of N tokens.
  void advance(std::int64_t tokens) { length_ += tokens; }

 private:
  std::vector<at::Tensor> k_, v_;  // a layer each: [K, capacity, D]
  std::int64_t capacity_;
  std::int64_t length_ = 0;
};

}  // namespace tapetune
