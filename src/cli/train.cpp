#include "train/trainer.h"

#include <ATen/Parallel.h>
#include <CLI/CLI.hpp>

#include "cli/together.h"
#include "cli/verbs.h"
#include "core/json.h"
#include "recipe/shipped.h"

namespace tapetune::cli {

void add_train(CLI::App& app) {
  struct Options {
    std::string recipe;
    std::vector<std::string> words;
    int threads = 0;
    bool timing = false;
    TogetherOptions together;
  };
  const auto options = std::make_shared<Options>();
  CLI::App* verb = app.add_subcommand("train", "Trains as a recipe says; a run that was cut off goes on by itself");
  verb->add_option("recipe", options->recipe, "A recipe's file, or the name of a shipped one")->required();
  verb->add_option("settings", options->words, "key=value over the recipe's: model, data, run, steps, optimizer.lr, …");
  verb->add_option("--threads", options->threads, "Cores to use (default: all)")->check(CLI::PositiveNumber);
  verb->add_flag("--timing", options->timing, "When the first step began, on the monotonic clock, as JSON on stderr");
  add_together(*verb, options->together);
  verb->footer("example: tapetune train llama2-7b-8k/tape model=/models/Llama-2-7b-hf data=rp-8k.tokens run=runs/tape");
  verb->callback([options] {
    if (options->threads > 0) at::set_num_threads(options->threads);
    together(options->together, [&](World& world) {
      const Recipe recipe = read_recipe(find_recipe(options->recipe), options->words);
      const TrainResult result = train(recipe, TAPETUNE_VERSION, world);
      if (!world.leads()) return;
      fmt::print("{} steps, last loss {:.4f}, adapter in {}\n", result.steps, result.loss, result.adapter);
      if (options->timing) fmt::print(stderr, "{}\n", to_text(Json{{"first_step_at", result.first_step_at}}));
    });
  });
}

}  // namespace tapetune::cli
