#include "train/trainer.h"

#include <ATen/Parallel.h>
#include <CLI/CLI.hpp>

#include "cli/exit_code.h"
#include "cli/numbers.h"
#include "cli/run_distributed.h"
#include "cli/verbs.h"
#include "core/digits.h"
#include "core/error.h"
#include "core/json.h"
#include "core/log.h"
#include "core/output.h"
#include "core/shell.h"
#include "recipe/shipped.h"
#include "run/inputs.h"
#include "run/open.h"
#include "run/run_data.h"
#include "run/run_folder.h"

namespace tapetune::cli {

namespace {

// A recipe, or a run to resume.
Recipe recipe_to_train(const std::string& given, const std::vector<std::string>& overrides) {
  if (!is_run(given)) return read_recipe(find_recipe(given), overrides);
  const std::filesystem::path folder = given;
  std::error_code status;
  if (!std::filesystem::is_directory(folder / "checkpoints", status)) {
    fail("train",
         "{}: has a recipe.yaml but no checkpoints, so it is not a training run; to train by its recipe, give {}.",
         given, (folder / "recipe.yaml").string());
  }
  Recipe recipe = RunFolder::recipe_in(folder, overrides);
  // The folder may have been moved since, unless the user wants another.
  const bool elsewhere =
      std::any_of(overrides.begin(), overrides.end(), [](const std::string& word) { return word.starts_with("run="); });
  if (!elsewhere) recipe.run = given;
  return recipe;
}

void print_summary(const Recipe& recipe, const TrainResult& result) {
  print_out("{}, last loss {:.4f}, adapter in {}\n", counted(result.steps, "step"), result.loss, result.adapter);
  if (quiet()) return;
  if (result.steps > result.first_step) {
    print_out("{} in {}, {} tokens/s, peak memory {:.0f} MB\n", counted(result.steps - result.first_step, "step"),
              time_text(result.seconds), grouped(std::llround(result.tokens_per_s)), result.peak_mb);
  }
  const std::string run = shell_word(recipe.run);
  std::string folder = recipe.run;
  while (folder.ends_with('/')) folder.pop_back();
  const Recipe found = with_found_paths(recipe, recipe.run, /*say=*/false);
  const std::string data = recipe.held_out > 0 ? shell_word(token_path(found, 0).string()) + " --split held-out"
                                               : std::string("HELD-OUT.txt");
  print_out("next: tapetune eval perplexity {} --data {} --context {}\n", run, data, recipe.context);
  print_out("      tapetune merge {} --out {}\n", run, shell_word(folder + "-merged"));
}

}  // namespace

void add_train(CLI::App& app) {
  struct Options {
    std::string recipe;
    std::vector<std::string> overrides;
    int threads = 0;
    bool timing = false;
    DistributedOptions distributed;
  };
  const auto options = std::make_shared<Options>();
  CLI::App* verb = app.add_subcommand("train", "Train as a recipe says; rerun the same command to resume");
  verb->add_option("recipe", options->recipe, "A recipe file, the name of a shipped one, or a run folder to resume")
      ->required();
  verb->add_option("settings", options->overrides, "key=value overrides: model, data, run, steps, optimizer.lr, …");
  verb->add_option("--threads", options->threads, "CPU threads (default: all cores)")->transform(thread_count());
  verb->add_flag("--timing", options->timing, "Print when the first step began, on the monotonic clock, to stderr");
  add_distributed(*verb, options->distributed);
  verb->footer(
      "example: tapetune train llama2-7b-8k/tape model=/models/Llama-2-7b-hf data=rp-8k.tokens run=runs/tape\n"
      "         tapetune train runs/tape");
  verb->callback([options] {
    if (options->threads > 0) at::set_num_threads(options->threads);
    run_distributed(options->distributed, [&](World& world) {
      const Recipe recipe = recipe_to_train(options->recipe, options->overrides);
      const TrainResult result = train(recipe, TAPETUNE_VERSION, world,
                                       [](const std::exception_ptr& thrown) { return exit_message(thrown).text; });
      if (!world.is_rank0()) return;
      print_summary(recipe, result);
      if (options->timing) write_error(to_text(Json{{"first_step_at", result.first_step_at}}) + "\n");
    });
  });
}

}  // namespace tapetune::cli
