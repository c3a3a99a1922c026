// A model that a comparison evaluates: the base model, or what a recipe trained.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "adapters/build_model.h"
#include "core/json.h"
#include "recipe/recipe.h"

namespace tapetune {

class EvalTarget {
 public:
  static EvalTarget base_of(const Recipe& recipe, at::Device device);
  static EvalTarget trained_by(std::string name, const Recipe& recipe, at::Device device);

  const std::string& name() const { return name_; }
  std::int64_t trained_context() const { return run_ ? recipe_.context : 0; }
  // All that an evaluation depends on, besides the text and the protocol.
  Json identity(const std::string& version) const;
  // Opened only if something is left to evaluate.
  const AdaptedModel& model();
  // Whether its position states change from layer to layer.
  bool positions_change() const;

 private:
  EvalTarget(std::string name, const Recipe& recipe, std::optional<std::filesystem::path> run, at::Device device);

  std::string name_;
  const Recipe& recipe_;
  std::optional<std::filesystem::path> run_;  // none: the base model
  at::Device device_;
  Json weights_;  // hashes of them
  std::optional<AdaptedModel> model_;
};

}  // namespace tapetune
