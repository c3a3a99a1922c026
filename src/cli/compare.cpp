#include "compare/compare.h"

#include <ATen/Parallel.h>
#include <CLI/CLI.hpp>

#include "cli/exit_code.h"
#include "cli/numbers.h"
#include "cli/options.h"
#include "cli/run_distributed.h"
#include "cli/verbs.h"
#include "core/output.h"
#include "report/report.h"
#include "report/tables.h"

namespace tapetune::cli {

void add_compare(CLI::App& app) {
  struct Options {
    std::vector<std::string> words;
    std::string eval, out, runs;
    int threads = 0;
    DistributedOptions distributed;
  };
  const auto options = std::make_shared<Options>();
  CLI::App* verb = app.add_subcommand(
      "compare", "Train recipes, evaluate them and their base model the same way, and write a report");
  verb->add_option("recipes", options->words,
                   "Recipe files or names of shipped recipes, then key=value settings for all of them")
      ->required();
  verb->add_option("--out", options->out, "Folder for the report and for evaluations in progress")->required();
  verb->add_option("--runs", options->runs,
                   "Folder that gets a run folder for each recipe (default: the recipes' own)");
  verb->add_option("--eval", options->eval,
                   "YAML or JSON file with what to evaluate: data, contexts, protocol, stride, limit, passkey "
                   "{contexts, depths, trials, seed} (default: sliding window perplexity on the held-out data, up to "
                   "twice the training context)");
  verb->add_option("--threads", options->threads, "CPU threads (default: all cores)")->transform(thread_count());
  add_distributed(*verb, options->distributed);
  verb->footer(
      "Finished runs and evaluations are kept: rerun the same command to resume after Ctrl-C or a crash.\n"
      "example: tapetune compare llama2-7b-8k/lora llama2-7b-8k/tape model=/models/Llama-2-7b-hf data=rp-8k.tokens "
      "held_out=0.01 --out compare/");
  verb->callback([options] {
    if (options->threads > 0) at::set_num_threads(options->threads);
    run_distributed(options->distributed, [&](World& world) {
      const RecipeWords words = split_words(options->words);
      CompareOptions comparing;
      if (!options->eval.empty()) comparing.plan = read_eval_plan(options->eval);
      comparing.out = options->out;
      comparing.version = TAPETUNE_VERSION;
      comparing.recipe_words = words.recipes;
      comparing.settings = words.settings;
      comparing.eval_file = options->eval;
      comparing.describe_error = [](const std::exception_ptr& thrown) { return exit_message(thrown).text; };
      const std::vector<NamedRecipe> recipes = read_recipes(words.recipes, words.settings, options->runs);
      const Comparison comparison = compare(recipes, comparing, world);
      if (!world.is_rank0()) return;
      write_report(comparison, options->out);
      print_out("{}\nreport: {}\n", markdown(comparison), (comparing.out / "report.html").string());
    });
  });
}

}  // namespace tapetune::cli
