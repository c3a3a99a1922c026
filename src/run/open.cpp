#include "run/open.h"

#include "adapters/checkpoints.h"
#include "adapters/peft.h"
#include "core/error.h"
#include "core/log.h"
#include "run/inputs.h"
#include "run/run_folder.h"

namespace tapetune {

namespace {

namespace fs = std::filesystem;

// "dir/" and "dir" are the same folder.
fs::path tidy(const fs::path& folder) {
  const fs::path normal = fs::absolute(folder).lexically_normal();
  return normal.has_filename() ? normal : normal.parent_path();
}

// RUN of RUN/adapter and RUN/checkpoints/step-N; empty where it is neither.
fs::path run_around(const fs::path& folder) {
  std::error_code status;
  if (!fs::is_directory(folder, status)) return {};
  const fs::path full = tidy(folder);
  const bool result = full.filename() == "adapter";
  const bool checkpoint = RunFolder::step_of(full) && full.parent_path().filename() == "checkpoints";
  if (!result && !checkpoint) return {};
  const fs::path run = result ? full.parent_path() : full.parent_path().parent_path();
  // A recipe and an adapter side by side may also be somebody's own order.
  return is_run(run) && fs::is_directory(run / "checkpoints", status) ? run : fs::path();
}

}  // namespace

bool is_run(const fs::path& folder) {
  std::error_code status;
  return fs::exists(folder / "recipe.yaml", status) && !fs::exists(folder / "config.json", status);
}

ModelFolder identify(const fs::path& folder) {
  using Kind = ModelFolder::Kind;
  if (is_run(folder)) return {Kind::run, folder, folder};
  if (const fs::path run = run_around(folder); !run.empty()) return {Kind::run, folder, run};
  std::error_code status;
  if (fs::exists(folder / "config.json", status)) return {Kind::checkpoint, folder, {}};
  const bool adapter =
      fs::exists(folder / "adapter_config.json", status) || fs::exists(folder / "tapetune.json", status);
  return {adapter ? Kind::adapter : Kind::none, folder, {}};
}

fs::path base_folder(const ModelFolder& found) {
  if (found.kind == ModelFolder::Kind::run) return read_run_recipe(found.run, /*say=*/false).model;
  if (found.kind != ModelFolder::Kind::adapter) return found.folder;
  const AdapterBase base = adapter_base(found.folder);
  if (base.folder.empty()) {
    fail("model", "{}: is an adapter, and its base model{} is not a folder here; give BASE --adapter {}.",
         found.folder.string(), base.name.empty() ? "" : fmt::format(" {}", base.name), found.folder.string());
  }
  return base.folder;
}

RunAdapter find_adapter(const ModelFolder& found) {
  if (found.run != found.folder) return {found.folder, RunFolder::step_of(tidy(found.folder))};
  std::error_code status;
  if (fs::is_directory(found.run / "adapter", status)) return {found.run / "adapter", std::nullopt};
  const auto last = RunFolder::latest_in(found.run);
  if (!last) {
    fail("run", "{}: has neither a result (adapter) nor a checkpoint yet; continue its training first.",
         found.run.string());
  }
  warn("{}: training is not finished; its checkpoint of step {} is used", found.run.string(), last->step);
  return {last->folder, last->step};
}

TrainedModel open_run(const ModelFolder& found, std::optional<at::ScalarType> dtype, at::Device device, bool any_base) {
  Recipe recipe = read_run_recipe(found.run);
  RunAdapter trained = find_adapter(found);
  std::optional<Checkpoint> checkpoint;
  if (!recipe.init) {
    std::error_code status;
    if (!fs::exists(recipe.model, status)) {
      fail("run", "{}: its base model {} is not there; move it back, or link it to that place.", found.run.string(),
           recipe.model);
    }
    checkpoint = open_checkpoint(recipe.model);
    require_trained_base(found.run, recipe, *checkpoint, any_base);
  }
  BaseModel base = checkpoint ? base_from(recipe, *checkpoint, device) : open_base(recipe, device);
  AdaptedModel adapted = load_adapter(base.config, base.weights, trained.folder, dtype.value_or(base.dtype));
  adapted.model.set_context(trained_context(adapted.model.config(), recipe));
  return {std::move(recipe), std::move(base), std::move(trained), std::move(adapted)};
}

TrainedModel open_run(const fs::path& folder, std::optional<at::ScalarType> dtype, at::Device device, bool any_base) {
  return open_run(identify(folder), dtype, device, any_base);
}

}  // namespace tapetune
