#include "model/components.h"

#include "model/rotary.h"

namespace tapetune {

std::vector<at::Tensor> Adapter::project(const Call& call, const at::Tensor& x) const {
  return tapetune::project(call.frozen, {}, x, call.gradients_only);
}

std::optional<Adapter::Merge> Adapter::merge(std::string_view, const FindTrained&) const { return std::nullopt; }
bool Adapter::draws() const { return false; }
double Adapter::saved_numbers(std::int64_t) const { return 0; }

PositionState PositionEncoding::start(const PositionInput& in) const {
  // f32 in a model of f64 too, as in transformers.
  const Frequencies frequencies =
      rotary_frequencies(in.config.rope, in.config.head_dim, in.config.context, in.planned_length);
  return {cos_sin(frequencies, in.positions, at::kFloat), {}};
}

at::Tensor PositionEncoding::score_bias(const BiasInput&) const { return {}; }
PositionEncoding::Update PositionEncoding::update_kind(std::int64_t) const { return {}; }

PositionState PositionEncoding::update(std::int64_t, const PositionState& state, const at::Tensor&,
                                       const at::Tensor&) const {
  return state;
}

std::int64_t PositionEncoding::same_length(const ModelConfig& config, std::int64_t planned) const {
  return equivalent_length(config.rope, config.context, planned);
}

bool PositionEncoding::draws() const { return false; }
double PositionEncoding::saved_numbers(std::int64_t) const { return 0; }

bool PositionEncoding::uses_tensors(std::int64_t) const { return true; }

bool PositionEncoding::changes(std::int64_t layers) const {
  for (std::int64_t i = 0; i < layers; ++i) {
    if (update_kind(i).changes) return true;
  }
  return false;
}

bool PositionEncoding::attends(std::int64_t layers) const {
  for (std::int64_t i = 0; i < layers; ++i) {
    if (update_kind(i).attends) return true;
  }
  return false;
}

kernels::Visible AttentionPattern::visible(const VisibleInput&) const { return {}; }

}  // namespace tapetune
