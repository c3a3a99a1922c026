// Whether two models are the same: tensor by tensor, and by what they say to a prompt.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "core/json.h"

namespace tapetune {

struct VerifyOptions {
  std::filesystem::path a, b;   // a checkpoint, a run of train, or an adapter
  std::filesystem::path model;  // the adapter's base model, or another than the run's recipe says
  std::string prompt;           // empty: `tokens`, or where these are empty, some of the vocabulary
  std::vector<std::int64_t> tokens;
  double tolerance = 0;                    // on every number of every tensor
  std::optional<double> logits_tolerance;  // as a share of the largest logit; none: as the stored numbers allow
};

struct TensorDifference {
  std::string name;
  double absolute = 0;  // largest of all numbers; infinite where one side has a number and the other has none
  double relative = 0;  // the same, as a share of the largest number of the tensor in A
};

struct Verification {
  std::vector<std::string> only_a, only_b;   // names
  std::vector<std::string> unlike;           // "NAME: BF16 [2, 3] and F32 [2, 3]"
  std::int64_t compared = 0, identical = 0;  // tensors
  TensorDifference worst_absolute, worst_relative;
  std::int64_t tokens = 0;       // of the prompt
  double logits_difference = 0;  // largest
  double largest_logit = 0;      // in A, without its sign
  std::int64_t same_next = 0;    // tokens after which both find the same one likeliest
  double logits_tolerance = 0;   // that held, as a share
  bool tensors_agree = false, logits_agree = false;

  bool agree() const { return tensors_agree && logits_agree; }
};

// A run or an adapter stands for the model that its merge gives, in the other side's dtypes; its logits are those of
// the adapter beside the base model.
Verification verify(const VerifyOptions& options);

Json verification_json(const Verification& result);

}  // namespace tapetune
