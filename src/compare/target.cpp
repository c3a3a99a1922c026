#include "compare/target.h"

#include "core/file.h"
#include "core/mapped_file.h"
#include "hf/hash.h"
#include "plan/base.h"
#include "run/open.h"

namespace tapetune {

namespace {

namespace fs = std::filesystem;

MethodOptions no_method() { return parse_method("none", {}); }

std::string hash_of_adapter(const fs::path& run) {
  Hasher hasher;
  for (const char* file : {"adapter_model.safetensors", "adapter_config.json", "tapetune.json"}) {
    std::error_code status;
    if (const fs::path path = run / "adapter" / file; fs::exists(path, status)) {
      hasher.add(MappedFile::open(path)->bytes());
    }
  }
  return hasher.hex();
}

}  // namespace

EvalTarget::EvalTarget(std::string name, const Recipe& recipe, std::optional<fs::path> run, at::Device device)
    : name_(std::move(name)), recipe_(recipe), run_(std::move(run)), device_(device) {
  weights_["base"] = recipe.init ? recipe_yaml(recipe) : recipe.model_hash;
  if (run_) weights_["adapter"] = hash_of_adapter(*run_);
}

EvalTarget EvalTarget::base_of(const Recipe& recipe, at::Device device) {
  return {"base model", recipe, std::nullopt, device};
}

EvalTarget EvalTarget::trained_by(std::string name, const Recipe& recipe, at::Device device) {
  return {std::move(name), recipe, recipe.run, device};
}

Json EvalTarget::identity(const std::string& version) const {
  Json identity = weights_;
  identity["dtype"] = recipe_.dtype;
  identity["tapetune"] = version;
  return identity;
}

const AdaptedModel& EvalTarget::model() {
  if (model_) return *model_;
  if (run_) {
    model_.emplace(open_run(*run_, std::nullopt, device_).adapted);
  } else {
    const BaseModel base = open_base(recipe_, device_);
    model_.emplace(adapt(base.config, base.weights, no_method(), base.dtype));
  }
  return *model_;
}

bool EvalTarget::positions_change() const {
  const MetaModel base = meta_model(recipe_);
  const AdaptedModel adapted = adapt(base.config, base.weights, run_ ? recipe_.method : no_method(), base.dtype);
  return adapted.model.components().positions->changes(base.config.layers);
}

}  // namespace tapetune
