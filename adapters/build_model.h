// A model adapted by a method (method.h): its components (src/model/components.h), what trains, and what that is called
// on disk.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "adapters/method.h"
#include "model/llama.h"

namespace tapetune {

// A model in the making: a component changes what it needs to.
struct ModelBuilder {
  ModelConfig config;
  LlamaWeights weights;
  Components components;
  std::vector<std::string> notes;  // what the user should know
  at::Generator generator;         // for starting values
  at::TensorOptions trained_options;

  // A trained tensor with a start of its own, f32 or f64 on the model's device, entered among the parameters.
  at::Tensor train(const std::string& name, const at::Tensor& start, Owner owner, std::string_view group);
};

struct AdaptedModel {
  Llama model;
  std::vector<Parameter> parameters;
  MethodOptions options;
  std::vector<std::string> notes;
};

// A model with a method at its start. device: of what trains; that of the weights where it is not given.
AdaptedModel adapt(const ModelConfig& config, const LlamaWeights& weights, const MethodOptions& options,
                   at::ScalarType dtype, std::uint64_t seed = 0, std::optional<at::Device> device = std::nullopt);

// Says so where a method turns off the windows that its base has: the methods of version 1 do.
void note_windows_off(const ModelConfig& base, const MethodOptions& options);

// The position encoding that a method gives a model of this config.
struct PositionComponent;
const PositionComponent& position_component(const MethodOptions& options, const ModelConfig& config);

// Those of each layer in the order of Projection, then the head, whose layer is the number of layers.
using VisitProjection = std::function<void(std::int64_t layer, Projection which, const Linear& frozen)>;
void for_each_projection(const LlamaWeights& weights, const VisitProjection& visit);

std::string_view projection_name(Projection which);  // "q", …, "lm_head"
std::optional<Projection> find_projection(std::string_view name);
// model.layers.3.self_attn.q_proj, mlp.down_proj, lm_head (layer: any).
std::string module_name(std::int64_t layer, Projection which);

}  // namespace tapetune
