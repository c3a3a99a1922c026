#include "train/base.h"

#include "adapters/peft.h"
#include "adapters/tape/checkpoint.h"
#include "checkpoint/dtype.h"
#include "core/error.h"
#include "train/run_folder.h"

namespace tapetune {

namespace fs = std::filesystem;

namespace {

at::ScalarType dtype_of(const Recipe& recipe, at::ScalarType otherwise) {
  return recipe.dtype == "auto" ? otherwise : dtype_from_word(recipe.dtype).value();
}

}  // namespace

BaseModel open_base(const Recipe& recipe, at::Device device) {
  if (recipe.init) {
    const ModelConfig config = random_model_config(recipe);
    return {config, random_weights(config, recipe.seed, device), dtype_of(recipe, at::kFloat), "",
            recipe.init->tokenizer};
  }
  const Checkpoint checkpoint = Checkpoint::open(recipe.model);
  if (holds_positions(checkpoint.stored()) && (recipe.method.method != "tape" || recipe.init_from.empty())) {
    fail("train", "{}: holds TAPE's positions; to train on, give adapter.method tape and init_from: {}.", recipe.model,
         recipe.model);
  }
  return {checkpoint.config(), map_weights(checkpoint, device), dtype_of(recipe, default_dtype(checkpoint, device)),
          recipe.model, recipe.model};
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

RunAdapter find_adapter(const fs::path& folder) {
  std::error_code status;
  if (fs::is_directory(folder / "adapter", status)) return {folder / "adapter", std::nullopt};
  const auto last = RunFolder::latest_in(folder);
  if (!last) {
    fail("run", "{}: has neither a result (adapter) nor a checkpoint yet; let its training go on.", folder.string());
  }
  return {last->folder, last->step};
}

TrainedModel open_run(const fs::path& folder, std::optional<at::ScalarType> dtype, at::Device device) {
  Recipe recipe = read_recipe(folder / "recipe.yaml");
  RunAdapter trained = find_adapter(folder);
  BaseModel base = open_base(recipe, device);
  AdaptedModel adapted = load_adapter(base.config, base.weights, trained.folder, dtype.value_or(base.dtype));
  return {std::move(recipe), std::move(base), std::move(trained), std::move(adapted)};
}

}  // namespace tapetune
