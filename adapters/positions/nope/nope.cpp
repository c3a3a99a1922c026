#include "adapters/positions/nope/nope.h"

#include "adapters/positions/own_architecture.h"

namespace tapetune {

namespace {

class NoPositions final : public PositionEncoding {
 public:
  PositionState start(const PositionInput&) const override { return {}; }
  std::int64_t same_length(const ModelConfig&, std::int64_t) const override { return 1; }
};

}  // namespace

PositionComponent nope_component() {
  PositionComponent component;
  component.name = "nope";
  component.summary = "no positions beside the causal mask";
  component.title = "NoPE";
  component.make = [](const Settings&, ModelBuilder&) -> std::shared_ptr<const PositionEncoding> {
    return std::make_shared<const NoPositions>();
  };
  component.export_files = export_own_architecture;
  component.card =
      "A Llama whose positions are NoPE: no encoding beside the causal mask, merged by tapetune, which is the only "
      "program that reads it.";
  return component;
}

}  // namespace tapetune
