// The methods that have a name.
#include "adapters/component.h"
#include "adapters/method.h"

namespace tapetune {

namespace {

void with_lora(MethodOptions& options) {
  options.adapter = default_settings("lora", adapter_components().find("lora").keys);
}

constexpr Preset all[] = {
    {"none", "no trainable parameters; for evaluation", [](MethodOptions&) {}},
    {"full", "every weight trains", [](MethodOptions& o) { o.train_also.all = true; }},
    {"lora", "LoRA matrices beside chosen projections", with_lora},
    {"longlora", "lora, and attention in shifted groups while training",
     [](MethodOptions& o) {
       with_lora(o);
       o.attention = default_settings("shifted", pattern_components().find("shifted").keys);
     }},
    {"theta-scaling", "lora, and a larger rope_theta",
     [](MethodOptions& o) {
       with_lora(o);
       o.theta = 1e6;
     }},
    {"tape", "positions that learn from context; with rank=8, lora as well",
     [](MethodOptions& o) { o.positions = default_settings("tape", position_components().find("tape").keys); }}};

}  // namespace

std::span<const Preset> presets() { return all; }

const Preset& find_preset(std::string_view name) {
  std::vector<std::string_view> names;
  for (const Preset& preset : all) {
    if (preset.name == name) return preset;
    names.push_back(preset.name);
  }
  fail("method", "there is no method \"{}\"; there are {}{}.", name, fmt::join(names, ", "), did_you_mean(name, names));
}

}  // namespace tapetune
