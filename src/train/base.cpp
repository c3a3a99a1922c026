#include "train/base.h"

#include "adapters/checkpoints.h"
#include "adapters/component.h"
#include "adapters/peft.h"
#include "checkpoint/dtype.h"
#include "core/error.h"
#include "core/log.h"
#include "train/inputs.h"
#include "train/run_folder.h"

namespace tapetune {

namespace fs = std::filesystem;

namespace {

at::ScalarType dtype_of(const Recipe& recipe, at::ScalarType otherwise) {
  return recipe.dtype == "auto" ? otherwise : dtype_from_word(recipe.dtype).value();
}

BaseModel base_from(const Recipe& recipe, const Checkpoint& checkpoint, at::Device device) {
  const std::string& own = checkpoint.config().position;
  if (has_position_tensors(checkpoint) && (recipe.method.positions.type != own || recipe.init_from.empty())) {
    fail("train",
         "{}: already has {}'s position tensors; to train it further, set positions.encoding={} and init_from={}.",
         recipe.model, position_components().find(own).title, own, recipe.model);
  }
  return {checkpoint.config(), map_weights(checkpoint, device), dtype_of(recipe, default_dtype(checkpoint, device)),
          recipe.model, recipe.model};
}

// "dir/" and "dir" are the same folder.
fs::path tidy(const fs::path& folder) {
  const fs::path normal = fs::absolute(folder).lexically_normal();
  return normal.has_filename() ? normal : normal.parent_path();
}

}  // namespace

BaseModel open_base(const Recipe& recipe, at::Device device) {
  if (recipe.init) {
    const ModelConfig config = random_model_config(recipe);
    return {config, random_weights(config, recipe.seed, device), dtype_of(recipe, at::kFloat), "",
            recipe.init->tokenizer};
  }
  return base_from(recipe, open_checkpoint(recipe.model), device);
}

std::optional<Vocabulary> known_vocabulary(const fs::path& folder) {
  std::error_code status;
  const bool known = !folder.empty() && fs::exists(folder / "tokenizer.json", status);
  return known ? std::optional(read_vocabulary(folder)) : std::nullopt;
}

TokenFile open_tokens(const fs::path& path, const std::optional<Vocabulary>& vocabulary, const ModelConfig& config) {
  TokenFile file = path.extension() == ".bin" ? TokenFile::open_raw(path, config.vocab_size) : TokenFile::open(path);
  if (vocabulary) file.require_vocabulary(*vocabulary);
  if (file.info().vocabulary_size > config.vocab_size && !file.info().raw && !vocabulary) {
    fail("data", "{}: has a vocabulary of {} tokens, but the model has {}; pack it with the model's tokenizer.",
         path.string(), file.info().vocabulary_size, config.vocab_size);
  }
  return file;
}

bool is_run(const fs::path& folder) {
  std::error_code status;
  return fs::exists(folder / "recipe.yaml", status) && !fs::exists(folder / "config.json", status);
}

fs::path run_of(const fs::path& folder) {
  if (is_run(folder)) return folder;
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

RunAdapter find_adapter(const fs::path& folder) {
  if (!is_run(folder)) return {folder, RunFolder::step_of(tidy(folder))};
  std::error_code status;
  if (fs::is_directory(folder / "adapter", status)) return {folder / "adapter", std::nullopt};
  const auto last = RunFolder::latest_in(folder);
  if (!last) {
    fail("run", "{}: has neither a result (adapter) nor a checkpoint yet; continue its training first.",
         folder.string());
  }
  warn("{}: training is not finished; its checkpoint of step {} is used", folder.string(), last->step);
  return {last->folder, last->step};
}

std::int64_t trained_context(const ModelConfig& config, const Recipe& recipe) {
  return config.rope.type == RopeType::dynamic ? config.context : std::max(config.context, recipe.context);
}

void warn_beyond_scaling(const ModelConfig& base, const ModelConfig& adapted, std::int64_t context) {
  const std::int64_t scaled = adapted.longest_context();
  if (context <= scaled || adapted.rope.theta > base.rope.theta) return;
  const RopeType type = base.rope.type;
  const auto needed = static_cast<double>(context) / static_cast<double>(base.longest_context());
  const std::string factor = fmt::format("positions.factor={:g}", std::ceil(needed * 100) / 100);
  const std::string advice =
      type != RopeType::standard && type != RopeType::linear
          ? fmt::format("set positions.theta above {:g}, or use the model from before it was extended", base.rope.theta)
      : adapted.rope.type == RopeType::standard ? fmt::format("set {} and positions.scaling=linear", factor)
                                                : fmt::format("set {}", factor);
  warn("context {} is beyond the {} tokens that the positions are scaled for; {}", context, scaled, advice);
}

TrainedModel open_run(const fs::path& folder, std::optional<at::ScalarType> dtype, at::Device device, bool any_base) {
  const fs::path run = run_of(folder);
  Recipe recipe = read_run_recipe(run);
  RunAdapter trained = find_adapter(folder);
  std::optional<Checkpoint> checkpoint;
  if (!recipe.init) {
    std::error_code status;
    if (!fs::exists(recipe.model, status)) {
      fail("run", "{}: its base model {} is not there; move it back, or link it to that place.", run.string(),
           recipe.model);
    }
    checkpoint = open_checkpoint(recipe.model);
    require_trained_base(run, recipe, *checkpoint, any_base);
  }
  BaseModel base = checkpoint ? base_from(recipe, *checkpoint, device) : open_base(recipe, device);
  AdaptedModel adapted = load_adapter(base.config, base.weights, trained.folder, dtype.value_or(base.dtype));
  adapted.model.set_context(trained_context(adapted.model.config(), recipe));
  return {std::move(recipe), std::move(base), std::move(trained), std::move(adapted)};
}

}  // namespace tapetune
