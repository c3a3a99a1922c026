#include "model/seams.h"

#include "model/rotary.h"

namespace tapetune {

Checkpointing parse_checkpointing(std::string_view word) {
  return word == "full" ? Checkpointing::full : word == "selective" ? Checkpointing::selective : Checkpointing::off;
}

std::uint64_t Training::row_seed(std::int64_t row) const {
  return draw(seed, static_cast<std::uint64_t>(first_sequence + row));
}

std::vector<at::Tensor> LinearSeam::project(const Call& call, const at::Tensor& x) const {
  return tapetune::project(call.frozen, {}, x, call.gradients_only);
}

std::vector<at::Tensor> LinearSeam::trained(std::int64_t) const { return {}; }

at::Tensor RotarySeam::start(const ModelConfig& config, const at::Tensor& positions, std::int64_t planned_length,
                             at::ScalarType, const Training*) const {
  // f32 in a model of f64 too, as in transformers.
  return cos_sin(rotary_frequencies(config.rope, config.head_dim, config.context, planned_length), positions,
                 at::kFloat);
}

kernels::Cuts AttentionSeam::cuts(const ModelConfig&, std::int64_t, const Training*) const { return {}; }

bool PositionSeam::updates() const { return false; }

bool PositionSeam::updates(std::int64_t) const { return false; }

at::Tensor PositionSeam::update(std::int64_t, const at::Tensor& position, const at::Tensor&, const at::Tensor&) const {
  return position;
}

std::vector<at::Tensor> PositionSeam::trained(std::int64_t) const { return {}; }

}  // namespace tapetune
