// A method: the components that it adapts a model by (src/model/components.h), what it trains, and what that is called
// on disk.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "adapters/options.h"
#include "model/llama.h"

namespace tapetune {

// A model in the making: a method changes what it needs to.
struct ModelBuilder {
  const MethodOptions& options;
  ModelConfig config;
  LlamaWeights weights;
  Components components;
  std::vector<std::string> notes;  // what the user should know
  at::Generator generator;         // for starting values

  // A trained tensor with a start of its own, f32 or f64 on the model's device, entered among the parameters.
  at::Tensor train(const std::string& name, const at::Tensor& start, Owner owner, std::string_view group);
  at::TensorOptions trained_options;
};

struct Method {
  std::string_view name;
  std::string_view summary;
  std::vector<std::string_view> keys;
  void (*defaults)(MethodOptions& options);     // null: those of MethodOptions
  void (*check)(const MethodOptions& options);  // null: nothing beyond each key's own rule
  void (*make)(ModelBuilder& model);
};

std::span<const Method> methods();
// Fails with the nearest name where there is none such.
const Method& find_method(std::string_view name);

struct AdaptedModel {
  Llama model;
  std::vector<Parameter> parameters;
  MethodOptions options;
  std::vector<std::string> notes;
};

// A model with a method at its start. device: of what trains; that of the weights where it is not given.
AdaptedModel adapt(const ModelConfig& config, const LlamaWeights& weights, const MethodOptions& options,
                   at::ScalarType dtype, std::uint64_t seed = 0, std::optional<at::Device> device = std::nullopt);

// model.layers.3.self_attn.q_proj, mlp.down_proj, lm_head (layer: any).
std::string module_name(std::int64_t layer, Projection which);

}  // namespace tapetune
