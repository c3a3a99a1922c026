#include "run/base.h"

#include "adapters/checkpoints.h"
#include "adapters/component.h"
#include "checkpoint/dtype.h"
#include "core/error.h"
#include "core/log.h"

namespace tapetune {

namespace fs = std::filesystem;

namespace {

at::ScalarType dtype_of(const Recipe& recipe, at::ScalarType otherwise) {
  return recipe.dtype == "auto" ? otherwise : dtype_from_word(recipe.dtype).value();
}

}  // namespace

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

}  // namespace tapetune
