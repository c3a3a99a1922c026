#include "report/compare.h"

#include <ATen/Parallel.h>
#include <CLI/CLI.hpp>

#include "cli/options.h"
#include "cli/together.h"
#include "cli/verbs.h"

namespace tapetune::cli {

void add_compare(CLI::App& app) {
  struct Options {
    std::vector<std::string> words;
    std::string eval, out, runs;
    int threads = 0;
    TogetherOptions together;
  };
  const auto options = std::make_shared<Options>();
  CLI::App* verb =
      app.add_subcommand("compare", "Trains recipes, measures them and their base model alike, and writes a report");
  verb->add_option("recipes", options->words, "Recipes' files or shipped names, then key=value over all of them")
      ->required();
  verb->add_option("--out", options->out, "Folder of the report, and of what was measured so far")->required();
  verb->add_option("--runs", options->runs, "Folder for a run folder each (default: those that the recipes name)");
  verb->add_option("--eval", options->eval,
                   "What to measure, as YAML or JSON: data, contexts, protocol, stride, limit, passkey {contexts, "
                   "depths, trials, seed} (default: sliding, on what the recipes hold out, up to twice their context)");
  verb->add_option("--threads", options->threads, "Cores to use (default: all)")->check(CLI::PositiveNumber);
  add_together(*verb, options->together);
  verb->footer(
      "What is trained and measured already is kept: after Ctrl-C or a crash the same command goes on.\n"
      "example: tapetune compare llama2-7b-8k/lora llama2-7b-8k/tape model=/models/Llama-2-7b-hf data=rp-8k.tokens\n"
      "         held_out=0.01 --out compare/");
  verb->callback([options] {
    if (options->threads > 0) at::set_num_threads(options->threads);
    together(options->together, [&](World& world) {
      const RecipeWords words = split_words(options->words);
      CompareOptions comparing;
      if (!options->eval.empty()) comparing.plan = read_eval_plan(options->eval);
      comparing.out = options->out;
      comparing.version = TAPETUNE_VERSION;
      const std::vector<NamedRecipe> recipes = read_recipes(words.recipes, words.settings, options->runs);
      const Comparison comparison = compare(recipes, comparing, world);
      if (!world.leads()) return;
      write_report(comparison, options->out);
      fmt::print("{}\nreport: {}\n", markdown(comparison), (comparing.out / "report.html").string());
    });
  });
}

}  // namespace tapetune::cli
