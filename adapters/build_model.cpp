#include "adapters/build_model.h"

#include <ATen/CPUGeneratorImpl.h>

#include "adapters/component.h"
#include "adapters/train_also.h"
#include "core/error.h"
#include "core/log.h"

namespace tapetune {

namespace {

constexpr std::pair<Projection, std::string_view> projections[] = {
    {Projection::q, "q"},       {Projection::k, "k"},   {Projection::v, "v"},       {Projection::o, "o"},
    {Projection::gate, "gate"}, {Projection::up, "up"}, {Projection::down, "down"}, {Projection::head, "lm_head"}};

void set_rope(const MethodOptions& options, ModelConfig& config) {
  RopeConfig& rope = config.rope;
  if (options.theta) rope.theta = *options.theta;
  if (!options.scaling && !options.factor) return;
  const RopeType type = options.scaling.value_or(RopeType::linear);
  const double factor = options.factor.value_or(1.0);
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

void set_positions(const MethodOptions& options, const PositionComponent& encoding, ModelBuilder& model) {
  if (encoding.rotates) {
    set_rope(options, model.config);
  } else if (options.scaling || options.factor || options.theta) {
    fail("method", "scaling, factor and theta are RoPE's, but the positions are {}; drop them.", encoding.name);
  }
  const Settings settings =
      options.positions.type == base_positions ? default_settings(encoding.name, encoding.keys) : options.positions;
  model.components.positions = encoding.make(settings, model);  // which sees what the base's config names
  model.config.position = encoding.name;
}

}  // namespace

const PositionComponent& position_component(const MethodOptions& options, const ModelConfig& config) {
  const std::string& own = config.position;
  return position_components().find(options.positions.type != base_positions ? options.positions.type
                                    : own.empty()                            ? default_positions
                                                                             : std::string_view(own));
}

void for_each_projection(const LlamaWeights& weights, const VisitProjection& visit) {
  const auto layers = static_cast<std::int64_t>(weights.layers.size());
  for (std::int64_t i = 0; i < layers; ++i) {
    const auto frozen = linears(weights.layers[static_cast<std::size_t>(i)]);
    for (std::size_t p = 0; p < frozen.size(); ++p) visit(i, static_cast<Projection>(p), *frozen[p]);
  }
  visit(layers, Projection::head, weights.head);
}

std::string_view projection_name(Projection which) {
  return std::ranges::find(projections, which, &std::pair<Projection, std::string_view>::first)->second;
}

std::optional<Projection> find_projection(std::string_view name) {
  const auto* const found = std::ranges::find(projections, name, &std::pair<Projection, std::string_view>::second);
  return found == std::end(projections) ? std::nullopt : std::optional(found->first);
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

void note_windows_off(const ModelConfig& base, const MethodOptions& options) {
  if (options.window || base.longest_window() == 0) return;
  note("the model's sliding window of {} tokens is off (attention.window: none): attention is full",
       base.longest_window());
}

AdaptedModel adapt(const ModelConfig& config, const LlamaWeights& weights, const MethodOptions& options,
                   at::ScalarType dtype, std::uint64_t seed, std::optional<at::Device> device) {
  check_method(options, {.heads = config.heads, .base_trains = options.train_also.all});
  ModelBuilder model{config, weights, {}, {}, at::make_generator<at::CPUGeneratorImpl>(seed), {}};
  model.trained_options =
      weights.embedding.options().dtype(dtype == at::kDouble ? at::kDouble : at::kFloat).requires_grad(false);
  if (device) model.trained_options = model.trained_options.device(*device);
  for (LayerSpec& layer : model.config.layer_specs) layer.window = options.window ? layer.window : 0;
  // In this order, which is that of random draws, of parameters on disk, and of sums over their gradients.
  set_positions(options, position_component(options, config), model);
  model.components.adapter = adapter_components().find(options.adapter.type).make(options.adapter, model);
  model.components.attention = pattern_components().find(options.attention.type).make(options.attention, model);
  train_also(options, model);
  std::vector<Parameter> parameters = model.components.parameters;
  return {Llama(std::move(model.config), std::move(model.weights), dtype, std::move(model.components)),
          std::move(parameters), options, std::move(model.notes)};
}

}  // namespace tapetune
