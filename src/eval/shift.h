// How far a model's attention and positions change when a text moves: table 8 of the TAPE paper.
#pragma once

#include <cstdint>
#include <vector>

#include "model/llama.h"

namespace tapetune {

struct ShiftedLayer {
  double attention = 0;  // mean absolute difference of attention weights
  double position = 0;   // of dot products of position states, on the scale where a state's own is 1
};

struct ShiftDifference {
  std::vector<ShiftedLayer> layers;
  double logits = 0;  // the largest difference
};

// All position ids moved by `by`.
ShiftDifference shifted_ids(const Llama& model, const std::vector<std::int64_t>& tokens, std::int64_t by);

// `count` copies of a token put in front; compared on the text that was there before, attention within it made to sum
// to 1.
ShiftDifference added_tokens(const Llama& model, const std::vector<std::int64_t>& tokens, std::int64_t token,
                             std::int64_t count);

}  // namespace tapetune
