#include "adapters/component.h"

#include "adapters/attention/shifted_groups/shifted_groups.h"
#include "adapters/linear/lora/lora.h"
#include "adapters/positions/alibi/alibi.h"
#include "adapters/positions/nope/nope.h"
#include "adapters/positions/rope/rope.h"
#include "adapters/positions/tape/tape.h"

namespace tapetune {

namespace {

AdapterComponent no_adapter() {
  AdapterComponent component;
  component.name = "none";
  component.summary = "projections as they are";
  component.make = [](const Settings&, ModelBuilder&) -> std::shared_ptr<const Adapter> {
    return std::make_shared<const Adapter>();
  };
  return component;
}

PatternComponent full_attention() {
  PatternComponent component;
  component.name = "full";
  component.summary = "every token sees all before it, as far as the model's windows reach";
  component.make = [](const Settings&, ModelBuilder&) -> std::shared_ptr<const AttentionPattern> {
    return std::make_shared<const AttentionPattern>();
  };
  return component;
}

}  // namespace

Registry<AdapterComponent>& adapter_components() {
  static Registry<AdapterComponent> all("adapter", {no_adapter(), lora_component()});
  return all;
}

Registry<PositionComponent>& position_components() {
  static Registry<PositionComponent> all("position encoding",
                                         {rope_component(), nope_component(), alibi_component(), tape_component()});
  return all;
}

Registry<PatternComponent>& pattern_components() {
  static Registry<PatternComponent> all("attention pattern", {full_attention(), shifted_groups_component()});
  return all;
}

}  // namespace tapetune
