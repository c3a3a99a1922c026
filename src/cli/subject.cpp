#include "cli/subject.h"

#include <ATen/Parallel.h>
#include <CLI/CLI.hpp>

#include "checkpoint/dtype.h"
#include "core/error.h"
#include "core/log.h"
#include "model/device.h"
#include "train/base.h"

namespace tapetune::cli {

namespace {

namespace fs = std::filesystem;

std::string full_name(const fs::path& path) { return fs::absolute(path).lexically_normal().string(); }

Subject open_run_subject(const ModelOptions& options) {
  if (!options.adapter.empty() || !options.method.empty()) {
    fail("model", "{}: is a run of train, which has an adapter of its own; leave --adapter and --method away.",
         options.folder);
  }
  if (options.threads > 0) at::set_num_threads(options.threads);
  TrainedModel run = open_run(options.folder, options.dtype == "auto" ? std::nullopt : dtype_from_word(options.dtype),
                              open_device(options.device));
  const std::optional<std::int64_t> step = run.trained.step;
  if (step) warn("{}: is not finished; its checkpoint of step {} is taken", options.folder, *step);
  return {full_name(run.trained.folder), std::move(run.adapted), run.base.tokenizer, std::move(run.recipe)};
}

}  // namespace

std::string Subject::identity() const {
  return fmt::format("{} in {}", name, dtype_to_transformers(adapted.model.dtype()));
}

Tokenizer Subject::open_tokenizer() const {
  if (tokenizer.empty()) fail("model", "{}: comes without a tokenizer, which is needed here.", name);
  return Tokenizer::open(tokenizer);
}

void add_subject(CLI::App& verb, ModelOptions& options, bool seeded) {
  options.add_to(verb, seeded);
  verb.get_option("model")->description("Folder of a Hugging Face checkpoint, or of a run of train");
}

Subject open_subject(const ModelOptions& options) {
  const fs::path folder = options.folder;
  if (is_run(folder)) return open_run_subject(options);
  std::error_code status;
  if (fs::is_directory(folder, status) && !fs::exists(folder / "config.json", status)) {
    fail("model", "{}: is neither a checkpoint (config.json: no such file) nor a run of train (recipe.yaml).",
         options.folder);
  }
  const Checkpoint checkpoint = options.open();
  std::string name = full_name(folder);
  if (!options.adapter.empty()) name += " with " + full_name(options.adapter);
  if (!options.method.empty()) name += fmt::format(" with {} (seed {})", fmt::join(options.method, " "), options.seed);
  return {std::move(name), options.load(checkpoint), folder, std::nullopt};
}

Subject open_subject(ModelOptions options, const World& world) {
  options.device = world.device().str();
  return open_subject(options);
}

}  // namespace tapetune::cli
