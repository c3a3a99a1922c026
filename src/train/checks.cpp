#include "train/checks.h"

#include <algorithm>
#include <span>

#include "adapters/checkpoints.h"
#include "checkpoint/finite.h"
#include "model/linear.h"
#include "train/setup.h"

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

void fail_not_finite(const TrainSetup& setup, std::int64_t step, const std::string& otherwise) {
  if (const std::string name = bad_base_weight(setup.base); !name.empty()) {
    throw_not_finite(
        "train",
        fmt::format("step {}: the base model's weight {} has NaN or Inf; {} is damaged, download or copy it again.",
                    step, name, setup.base.path));
  }
  std::string name = bad_parameter(setup.adapted.parameters);
  if (name.empty()) name = bad_gradient(setup.adapted.parameters);
  std::string good;
  if (setup.run) {
    const auto last = setup.run->latest_finite();
    good = fmt::format("; the last good checkpoint is {}", last ? last->folder.string() : "none yet");
  }
  throw_not_finite("train", fmt::format("step {}: {} is NaN or Inf{}. Try a smaller optimizer.lr.", step,
                                        name.empty() ? otherwise : name, good));
}

void require_finite(const TrainSetup& setup, std::int64_t step) {
  const std::string bad = bad_parameter(setup.adapted.parameters), moments = setup.optimizer.first_not_finite();
  if (!setup.mesh.all_reduce(0, !bad.empty() || !moments.empty()).any) return;
  fail_not_finite(setup, step, bad.empty() && !moments.empty() ? "the optimizer state of " + moments : "the update");
}

}  // namespace tapetune
