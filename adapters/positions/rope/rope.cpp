#include "adapters/positions/rope/rope.h"

#include "model/rotary.h"

namespace tapetune {

namespace {

// Angles as precise as the model, where a config names the encoding; without that, as transformers has them, in f32.
class ExactRope final : public PositionEncoding {
 public:
  PositionState start(const PositionInput& in) const override {
    const Frequencies frequencies =
        rotary_frequencies(in.config.rope, in.config.head_dim, in.config.context, in.planned_length, in.dtype);
    return {cos_sin(frequencies, in.positions, in.dtype), {}};
  }
};

std::shared_ptr<const PositionEncoding> make_rope(const Settings&, ModelBuilder& model) {
  if (model.config.position.empty()) return std::make_shared<const PositionEncoding>();
  return std::make_shared<const ExactRope>();
}

}  // namespace

PositionComponent rope_component() {
  PositionComponent component;
  component.name = "rope";
  component.summary = "queries and keys are rotated by their positions";
  component.title = "RoPE";
  component.rotates = true;
  component.make = make_rope;
  return component;
}

}  // namespace tapetune
