#include "plan/base.h"

#include "adapters/checkpoints.h"
#include "checkpoint/dtype.h"
#include "checkpoint/folder.h"
#include "core/error.h"
#include "core/file.h"
#include "core/json.h"
#include "model/llama.h"

namespace tapetune {

namespace {

// What config.json says that the weights are stored in: "dtype", or "torch_dtype" before transformers 5.
at::ScalarType stored_dtype(const std::string& text, const std::string& where) {
  const Json json = parse_json(text, "plan", where);
  const Json& word = json.contains("dtype") ? json["dtype"] : json.value("torch_dtype", Json());
  return word == "float32" ? at::kFloat : word == "float16" ? at::kHalf : at::kBFloat16;
}

}  // namespace

MetaModel meta_model(const Recipe& recipe) {
  MetaModel base;
  at::ScalarType stored = at::kFloat;
  if (recipe.init) {
    base.config = random_model_config(recipe);
  } else {
    const std::filesystem::path folder = recipe.model, file = folder / "config.json";
    refuse_gguf(folder);
    std::error_code status;
    if (!std::filesystem::exists(file, status)) {
      fail("plan", "{}: not found; name the model's folder with model=DIR (its config.json is enough).", file.string());
    }
    const std::string text = read_text(file);
    base.config = parse_config(text, file.string());
    require_known_position(base.config, file.string());
    const bool weights = std::filesystem::exists(folder / "model.safetensors", status) ||
                         std::filesystem::exists(folder / "model.safetensors.index.json", status);
    stored = weights ? open_checkpoint(folder.string()).dtype() : stored_dtype(text, file.string());
  }
  const bool narrow = stored == at::kHalf || stored == at::kBFloat16;
  base.dtype = recipe.dtype != "auto"           ? dtype_from_word(recipe.dtype).value()
               : narrow && !cpu_has_fast_bf16() ? at::kFloat
                                                : stored;
  base.weights = make_weights(base.config, [&](const TensorSpec& tensor) {
    return at::empty(tensor.shape, at::TensorOptions().dtype(stored).device(at::kMeta));
  });
  return base;
}

}  // namespace tapetune
