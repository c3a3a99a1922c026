// How far a model's attention and positions change when a text moves: table 8 of the TAPE paper.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "adapters/build_model.h"
#include "core/json.h"
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

// How to get the models that are compared.
struct ShiftModels {
  // With a method at its start (its name, then key=value overrides), or, where there is none, as it is.
  std::function<AdaptedModel(const std::vector<std::string>& method)> load;
  std::function<AdaptedModel()> load_trained;  // with an adapter; null: there is none
  std::vector<std::string> method;             // empty without an adapter: an encoding that has an ablation
  double spread = 0.02;                        // standard deviation of what is put in place of zeros
  std::uint64_t seed = 0;
};

struct NamedModel {
  std::string name;
  AdaptedModel adapted;
};
// The model as it is, the one with the method or adapter, and, where its encoding has an ablation, a third that lacks
// its invariance. What is freshly made gets random values where it starts at zero, because it shows nothing yet.
std::vector<NamedModel> shift_models(const ModelConfig& config, const ShiftModels& models);

struct ShiftResult {
  std::string model;
  ShiftDifference added, shifted;  // by added_tokens and shifted_ids
};
std::vector<ShiftResult> measure_shifts(const std::vector<NamedModel>& models, const std::vector<std::int64_t>& tokens,
                                        std::int64_t front, std::int64_t by);

Json shift_json(const std::vector<ShiftResult>& results);

}  // namespace tapetune
