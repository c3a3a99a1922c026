#include "train/checks.h"

#include <algorithm>
#include <span>

#include "adapters/checkpoints.h"
#include "checkpoint/finite.h"
#include "model/linear.h"

namespace tapetune {

namespace {

bool has_nan_or_inf(const at::Tensor& t) { return t.defined() && !all_finite(t); }

}  // namespace

void require_same_run(World& world, const Recipe& recipe, const BaseModel& base, const Json& data,
                      const std::string& data_sample, const std::string& version) {
  if (world.size() == 1) return;
  world.require_same("a version of tapetune", version, "install the same everywhere");
  world.require_same("a recipe", recipe_yaml(recipe), "start all ranks with the same command");
  if (recipe.sequence_parallel > 1 && base.dtype != at::kFloat) {
    // Two ways to compute attention, and what it exchanges for its gradient differs.
    world.require_same("a way to compute in bf16", cpu_has_fast_bf16() ? "the processor's own" : "through f32",
                       "set dtype=f32, or use machines of one kind");
  }
  std::uint64_t weights = 0;
  for (const auto& [name, tensor] : named_weights(base.config, base.weights)) {
    constexpr std::int64_t numbers = 256;
    const at::Tensor begin = tensor.flatten().narrow(0, 0, std::min(numbers, tensor.numel())).cpu();
    const auto* bytes = static_cast<const std::uint8_t*>(begin.const_data_ptr());
    const std::size_t count = begin.nbytes();
    for (const std::uint8_t byte : std::span(bytes, count)) weights = (weights ^ byte) * 0x100000001B3U;
  }
  world.require_same("base weights", fmt::format("{:016x}", weights), "copy the same model to every machine");
  world.require_same("data", fmt::format("{} {}", to_text(data), data_sample),
                     "copy the same token files to every machine");
}

std::string bad_base_weight(const BaseModel& base) {
  const bool here = !base.weights.layers.empty();
  if (!here && base.path.empty()) return "";
  for (const auto& [name, tensor] :
       named_weights(base.config, here ? base.weights : map_weights(open_checkpoint(base.path)))) {
    if (has_nan_or_inf(tensor)) return name;
  }
  return "";
}

std::string bad_parameter(const std::vector<Parameter>& parameters) {
  for (const Parameter& p : parameters) {
    if (has_nan_or_inf(p.value.detach())) return p.name;
  }
  return "";
}

std::string bad_gradient(const std::vector<Parameter>& parameters) {
  for (const Parameter& p : parameters) {
    if (has_nan_or_inf(p.value.grad())) return "the gradient of " + p.name;
  }
  return "";
}

}  // namespace tapetune
