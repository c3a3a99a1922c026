#include "cli/loaded_model.h"

#include <ATen/Parallel.h>
#include <CLI/CLI.hpp>

#include "checkpoint/dtype.h"
#include "core/error.h"
#include "core/log.h"
#include "model/device.h"
#include "run/open.h"

namespace tapetune::cli {

namespace {

namespace fs = std::filesystem;

std::string full_name(const fs::path& path) { return fs::absolute(path).lexically_normal().string(); }

LoadedModel open_loaded_run(const ModelFolder& found, const ModelOptions& options) {
  if (!options.adapter.empty() || !options.method.empty()) {
    fail("model", "{}: is a training run, which has an adapter of its own; drop {}.", options.folder,
         options.adapter.empty() ? "--method" : "--adapter");
  }
  if (options.threads > 0) at::set_num_threads(options.threads);
  TrainedModel run = open_run(found, options.dtype == "auto" ? std::nullopt : dtype_from_word(options.dtype),
                              open_device(options.device), options.any_base);
  return {full_name(run.trained.folder), std::move(run.adapted), run.base.tokenizer, std::move(run.recipe)};
}

ModelOptions with_base_of_adapter(const ModelFolder& found, ModelOptions options) {
  if (!options.adapter.empty() || !options.method.empty()) {
    fail("model", "{}: is an adapter; drop {}.", options.folder, options.adapter.empty() ? "--method" : "--adapter");
  }
  options.adapter = options.folder;
  options.folder = base_folder(found).string();
  return options;
}

}  // namespace

std::string LoadedModel::identity() const {
  return fmt::format("{} in {}", name, dtype_to_transformers(adapted.model.dtype()));
}

Tokenizer LoadedModel::open_tokenizer() const {
  if (tokenizer.empty())
    fail("model", "{}: has no tokenizer, which text needs; copy the model's tokenizer.json there.", name);
  return Tokenizer::open(tokenizer);
}

void fail_naming_weight(const LoadedModel& loaded, const NotFinite& error) {
  const auto refuse = [&](const std::string& name, const at::Tensor& tensor) {
    if (!tensor.defined() || all_finite(tensor.detach())) return;
    fail("model", "{}: {} has NaN or Inf; the adapter or the base model is damaged, use another checkpoint.",
         loaded.name, name);
  };
  const Llama& model = loaded.adapted.model;
  for (const Parameter& parameter : loaded.adapted.parameters) refuse(parameter.name, parameter.value);
  for (const auto& [name, tensor] : named_weights(model.config(), model.weights())) refuse(name, tensor);
  throw error;
}

void add_loaded_model(CLI::App& verb, ModelOptions& options, bool seeded) {
  options.add_to(verb, seeded);
  verb.get_option("model")->description(
      "Folder of a Hugging Face checkpoint, of a training run, of a checkpoint of one (RUN/checkpoints/step-N), or of "
      "a "
      "PEFT adapter");
  verb.add_flag("--any-base", options.any_base, "Of a run: use its base model even if that changed since training");
}

LoadedModel open_loaded_model(const ModelOptions& given) {
  using Kind = ModelFolder::Kind;
  const ModelFolder found = identify(given.folder);
  if (found.kind == Kind::run) return open_loaded_run(found, given);
  const ModelOptions options = found.kind == Kind::adapter ? with_base_of_adapter(found, given) : given;
  const fs::path folder = options.folder;
  refuse_gguf(folder);
  std::error_code status;
  if (found.kind == Kind::none && fs::is_directory(folder, status)) {
    fail("model",
         "{}: is neither a checkpoint (config.json: no such file), nor a training run (recipe.yaml), nor an adapter "
         "(adapter_config.json).",
         options.folder);
  }
  const Checkpoint checkpoint = options.open();
  std::string name = full_name(folder);
  if (!options.adapter.empty()) name += " with " + full_name(options.adapter);
  if (!options.method.empty()) name += fmt::format(" with {} (seed {})", fmt::join(options.method, " "), options.seed);
  return {std::move(name), options.load(checkpoint), folder, std::nullopt};
}

LoadedModel open_loaded_model(ModelOptions options, const World& world) {
  options.device = world.device().str();
  return open_loaded_model(options);
}

}  // namespace tapetune::cli
