#include "adapters/adapter.h"

#include <ATen/CPUGeneratorImpl.h>

#include "adapters/full/full.h"
#include "adapters/longlora/longlora.h"
#include "adapters/lora/lora.h"
#include "adapters/tape/tape.h"
#include "adapters/theta_scaling/theta_scaling.h"
#include "core/error.h"
#include "core/nearest.h"

namespace tapetune {

namespace {

// What every method takes: RoPE settings and other trainable parameters.
std::vector<std::string_view> with_common(std::vector<std::string_view> keys) {
  for (const std::string_view key : {"scaling", "factor", "theta", "train_also", "untie"}) keys.push_back(key);
  return keys;
}

std::vector<std::string_view> with_lora(std::vector<std::string_view> keys) {
  for (const std::string_view key :
       {"rank", "alpha", "dropout", "targets", "layers_to_transform", "exclude_modules", "rslora", "dora"})
    keys.push_back(key);
  return with_common(std::move(keys));
}

void make_nothing(ModelBuilder&) {}

void set_rotary(const MethodOptions& options, ModelConfig& config) {
  RopeConfig& rope = config.rope;
  if (options.theta) rope.theta = *options.theta;
  if (!options.scaling && !options.factor) return;
  const RopeType type = options.scaling.value_or(RopeType::linear);
  const double factor = options.factor.value_or(1.0);
  if (type != RopeType::standard && !options.factor) {
    fail("method", "scaling={} needs a factor; add factor=2 for twice the context.", rope_type_name(type));
  }
  if (type == RopeType::standard && options.factor) {
    fail("method", "scaling=none takes no factor; drop one of them.");
  }
  if (rope.type == RopeType::linear && type == RopeType::linear) {
    rope.factor *= factor;
    config.context = static_cast<std::int64_t>(std::llround(static_cast<double>(config.context) * factor));
    return;
  }
  if (rope.type != RopeType::standard) {
    fail("method",
         "the model's RoPE is scaled already ({}, factor {:g}), and scaling={} would replace that; set theta instead, "
         "or use the model from before it was extended.",
         rope_type_name(rope.type), rope.factor, type == RopeType::standard ? "none" : rope_type_name(type));
  }
  const std::int64_t before = config.longest_context();
  const double theta = rope.theta;
  rope = RopeConfig();
  rope.type = type;
  rope.theta = theta;
  rope.factor = factor;
  if (type == RopeType::yarn) rope.original_context = before;
  // Dynamic scaling keeps the original context in the config and stretches it while running.
  if (type == RopeType::dynamic) {
    config.context = before;
  } else {
    config.context = static_cast<std::int64_t>(std::llround(static_cast<double>(before) * factor));
  }
}

}  // namespace

std::span<const Method> methods() {
  static const std::vector<Method> all{
      {"none",
       "no trainable parameters; for evaluation",
       {"scaling", "factor", "theta"},
       nullptr,
       nullptr,
       make_nothing},
      {"full", "every weight trains", {"scaling", "factor", "theta", "untie"}, nullptr, nullptr, make_full},
      {"lora", "LoRA matrices beside chosen projections", with_lora({}), nullptr, check_lora, make_lora},
      {"longlora", "lora, and attention in shifted groups while training", with_lora({"group"}), nullptr, check_lora,
       make_longlora},
      {"theta-scaling", "lora, and a larger rope_theta", with_lora({}), theta_defaults, check_lora, make_theta_scaling},
      {"tape", "positions that learn from context; with rank=8, lora as well",
       with_lora({"mix", "width", "random_offset", "equivariant"}), tape_defaults, check_tape, make_tape}};
  return all;
}

const Method& find_method(std::string_view name) {
  std::vector<std::string_view> names;
  for (const Method& method : methods()) {
    if (method.name == name) return method;
    names.push_back(method.name);
  }
  const std::string meant = nearest(name, names);
  fail("method", "there is no method \"{}\"; there are {}{}.", name, fmt::join(names, ", "),
       meant.empty() ? "" : fmt::format(" (did you mean {}?)", meant));
}

std::string module_name(std::int64_t layer, Projection which) {
  if (which == Projection::head) return "lm_head";
  const bool mlp = which == Projection::gate || which == Projection::up || which == Projection::down;
  return fmt::format("model.layers.{}.{}.{}_proj", layer, mlp ? "mlp" : "self_attn", projection_name(which));
}

at::Tensor ModelBuilder::train(const std::string& name, const at::Tensor& start, Owner owner, std::string_view group) {
  at::Tensor value = start.detach()
                         .to(trained_options.device(), c10::typeMetaToScalarType(trained_options.dtype()),
                             /*non_blocking=*/false, /*copy=*/true)
                         .contiguous();
  value.requires_grad_(true);
  components.parameters.push_back({name, value, group, owner});
  return value;
}

AdaptedModel adapt(const ModelConfig& config, const LlamaWeights& weights, const MethodOptions& options,
                   at::ScalarType dtype, std::uint64_t seed, std::optional<at::Device> device) {
  const Method& method = find_method(options.method);
  ModelBuilder model{options, config, weights, {}, {}, at::make_generator<at::CPUGeneratorImpl>(seed), {}};
  model.trained_options =
      weights.embedding.options().dtype(dtype == at::kDouble ? at::kDouble : at::kFloat).requires_grad(false);
  if (device) model.trained_options = model.trained_options.device(*device);
  set_rotary(options, model.config);
  method.make(model);
  train_also(model);
  std::vector<Parameter> parameters = model.components.parameters;
  return {Llama(std::move(model.config), std::move(model.weights), dtype, std::move(model.components)),
          std::move(parameters), options, std::move(model.notes)};
}

}  // namespace tapetune
