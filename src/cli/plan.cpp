#include "plan/plan.h"

#include <ATen/Parallel.h>
#include <CLI/CLI.hpp>

#include "cli/options.h"
#include "cli/verbs.h"
#include "core/digits.h"
#include "core/json.h"
#include "recipe/shipped.h"

namespace tapetune::cli {

namespace {

std::string size_text(double bytes) {
  return bytes < 1e9 ? fmt::format("{:.0f} MB", bytes / 1e6) : fmt::format("{:.1f} GB", bytes / 1e9);
}

std::string time_text(double seconds) {
  if (seconds < 120) return fmt::format("{:.3g} s", seconds);
  if (seconds < 7200) return fmt::format("{:.0f} min", seconds / 60);
  return seconds < 172800 ? fmt::format("{:.1f} h", seconds / 3600) : fmt::format("{:.1f} days", seconds / 86400);
}

Json json_of(const Plan& plan, const Recipe& recipe) {
  Json root;
  root["parameters"] = plan.parameters;
  root["trained_parameters"] = plan.trained;
  root["trained_by_part"] = plan.trained_by_part;
  for (const auto& [part, bytes] : plan.memory) root["memory_bytes"][part] = std::llround(bytes);
  root["peak_memory_bytes"] = std::llround(plan.peak_memory());
  root["checkpoint_bytes"] = std::llround(plan.checkpoint_bytes);
  root["disk_bytes"] = std::llround(plan.disk_bytes);
  root["steps"] = recipe.steps;
  root["tokens"] = plan.tokens;
  if (plan.epochs) root["epochs"] = *plan.epochs;
  root["step_flops"] = plan.step_flops;
  if (plan.step_seconds) {
    root["step_seconds"] = *plan.step_seconds;
    root["seconds"] = *plan.step_seconds * static_cast<double>(recipe.steps);
  }
  return root;
}

void print_table(const Plan& plan, const Recipe& recipe, bool probed) {
  const auto count = [](std::int64_t n) { return grouped(static_cast<std::uint64_t>(n)); };
  const auto row = [](std::string_view key, const std::string& value) { fmt::print("{:<20} {:>16}\n", key, value); };
  row("parameters", count(plan.parameters));
  row("trained", count(plan.trained));
  for (const auto& [part, n] : plan.trained_by_part) row("  " + part, count(n));
  row("memory", size_text(plan.peak_memory()));
  for (const auto& [part, bytes] : plan.memory) row("  " + part, size_text(bytes));
  row("disk", size_text(plan.disk_bytes));
  row("  a checkpoint", size_text(plan.checkpoint_bytes));
  row("tokens", count(plan.tokens));
  row("  a step", count(recipe.batch * recipe.context));
  if (plan.epochs) row("  epochs", fmt::format("{:.2f}", *plan.epochs));
  row("operations a step", fmt::format("{:.3g}", plan.step_flops));
  if (!plan.step_seconds) return;
  row(probed ? "time (measured)" : "time (as given)",
      time_text(*plan.step_seconds * static_cast<double>(recipe.steps)));
  row("  a step", time_text(*plan.step_seconds));
}

}  // namespace

void add_plan(CLI::App& app) {
  struct Options {
    std::string recipe;
    std::vector<std::string> words;
    double flops = 0;
    bool no_probe = false, json = false;
    int threads = 0;
  };
  const auto options = std::make_shared<Options>();
  CLI::App* verb = app.add_subcommand(
      "plan", "What a recipe will take: parameters, memory, disk, tokens, time; a model's config.json is enough");
  verb->add_option("recipe", options->recipe, "A recipe's file, or the name of a shipped one")->required();
  verb->add_option("settings", options->words, "key=value over the recipe's: model, data, context, batch, …");
  verb->add_option("--flops", options->flops, "Operations a second of the machine that will train, as 1.5e14")
      ->check(CLI::PositiveNumber);
  verb->add_flag("--no-probe", options->no_probe, "No time from a few short steps on this machine");
  verb->add_option("--threads", options->threads, "Cores to use (default: all)")->check(CLI::PositiveNumber);
  verb->add_flag("--json", options->json, "For programs");
  verb->footer("example: tapetune plan llama2-7b-8k/tape model=/models/Llama-2-7b-hf --flops 1.5e14");
  verb->callback([options] {
    if (options->threads > 0) at::set_num_threads(options->threads);
    const Recipe recipe = read_recipe(find_recipe(options->recipe), options->words);
    Plan plan = make_plan(recipe);
    if (options->flops > 0) {
      plan.step_seconds = plan.step_flops / options->flops;
    } else if (!options->no_probe) {
      plan.step_seconds = probe_step(recipe);
    }
    if (options->json) {
      fmt::print("{}\n", json_of(plan, recipe).dump(2));
    } else {
      print_table(plan, recipe, options->flops <= 0);
    }
  });
}

}  // namespace tapetune::cli
