// A look into the layers: attention and positions as matrices, for texts so short that N x N may exist.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "model/llama.h"

namespace tapetune {

struct LayerView {
  at::Tensor attention;  // [H, n, n] f64: weights of keys (last) for queries
  at::Tensor position;   // [C, n, n] f64: dot products of position states, on the scale where a fresh state's own is 1;
                         // undefined where there are no states
};

// One pass over a text, of which the tokens from `from` on are looked at.
class LayerViews {
 public:
  LayerViews(const Llama& model, const std::vector<std::int64_t>& tokens, std::int64_t first_position = 0,
             std::int64_t from = 0);
  LayerView layer(std::int64_t index) const;
  at::Tensor logits() const;  // [n, vocab] f64

 private:
  struct Scored {
    at::Tensor q, k;  // [1, N, H|K, D], rotated
    kernels::Scores scores;
  };
  const Llama& model_;
  std::int64_t from_, kept_;
  std::vector<Scored> attention_;  // by layer
  ForwardOutput out_;
};

struct LayerPicture {
  double distance = 0;  // how far back attention reaches: the mean over heads and tokens, in tokens
  std::vector<std::vector<double>> position;  // mean dot products over channels, query by key, at sampled places
};

// Of all layers; `places` are tokens' indices, in rising order.
std::vector<LayerPicture> picture_layers(const Llama& model, const std::vector<std::int64_t>& tokens,
                                         const std::vector<std::int64_t>& places);

}  // namespace tapetune
