#include "plan/plan.h"

#include <ATen/Parallel.h>
#include <CLI/CLI.hpp>

#include "checkpoint/writer.h"
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

// Of the machine that will train.
struct Given {
  std::int64_t ranks = 1;
  double flops = 0;  // a second, of a rank
  double gpu = 0;    // bytes
  double link = 0;   // bytes a second
};

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
  const StepTraffic& sent = plan.traffic;
  root["sent_bytes"] = {
      {"gradients", sent.gradients}, {"weights", sent.weights}, {"values", sent.values}, {"sequence", sent.sequence}};
  if (plan.step_seconds) {
    root["step_seconds"] = *plan.step_seconds;
    root["seconds"] = *plan.step_seconds * static_cast<double>(recipe.steps);
  }
  return root;
}

void print_table(const Plan& plan, const Recipe& recipe, const Given& given) {
  const auto count = [](std::int64_t n) { return grouped(static_cast<std::uint64_t>(n)); };
  const auto row = [](std::string_view key, const std::string& value) { fmt::print("{:<20} {:>16}\n", key, value); };
  row("parameters", count(plan.parameters));
  row("trained", count(plan.trained));
  for (const auto& [part, n] : plan.trained_by_part) row("  " + part, count(n));
  row(given.ranks > 1 ? "memory of a rank" : "memory", size_text(plan.peak_memory()));
  for (const auto& [part, bytes] : plan.memory) row("  " + part, size_text(bytes));
  row("disk", size_text(plan.disk_bytes));
  row("  a checkpoint", size_text(plan.checkpoint_bytes));
  row("tokens", count(plan.tokens));
  row("  a step", count(recipe.batch * recipe.context));
  if (plan.epochs) row("  epochs", fmt::format("{:.2f}", *plan.epochs));
  row("operations a step", fmt::format("{:.3g}", plan.step_flops));
  if (given.ranks > 1) {
    const StepTraffic& sent = plan.traffic;
    row("a rank sends a step", size_text(sent.gradients + sent.weights + sent.values + sent.sequence));
    for (const auto& [part, bytes] : {std::pair("  gradients", sent.gradients), std::pair("  weights", sent.weights),
                                      std::pair("  values", sent.values), std::pair("  sequence", sent.sequence)}) {
      if (bytes > 0) row(part, size_text(bytes));
    }
  }
  if (plan.step_seconds) {
    row(given.flops > 0 ? "time (as given)" : "time (measured)",
        time_text(*plan.step_seconds * static_cast<double>(recipe.steps)));
    row("  a step", time_text(*plan.step_seconds));
  }
  if (given.gpu > 0 && plan.peak_memory() > given.gpu) {
    fmt::print("does not fit {}: set shard=base, sequence_parallel, checkpointing=full or a smaller micro_batch\n",
               size_text(given.gpu));
  }
}

// Computation and exchange of a step. Sums of gradients and gathers go on beside the computation; the exchange of a
// shared sequence is waited for.
double step_seconds(const Plan& plan, const Given& given) {
  const double compute = plan.step_flops / given.flops / static_cast<double>(given.ranks);
  if (given.ranks == 1 || given.link <= 0) return compute;
  const StepTraffic& sent = plan.traffic;
  return std::max(compute, (sent.gradients + sent.weights) / given.link) + (sent.sequence + sent.values) / given.link;
}

}  // namespace

void add_plan(CLI::App& app) {
  struct Options {
    std::string recipe;
    std::vector<std::string> words;
    Given given;
    std::string gpu, link;
    bool no_probe = false, json = false;
    int threads = 0;
  };
  const auto options = std::make_shared<Options>();
  CLI::App* verb = app.add_subcommand(
      "plan", "What a recipe will take: parameters, memory, disk, tokens, time; a model's config.json is enough");
  verb->add_option("recipe", options->recipe, "A recipe's file, or the name of a shipped one")->required();
  verb->add_option("settings", options->words, "key=value over the recipe's: model, data, context, batch, …");
  verb->add_option("--flops", options->given.flops, "Operations a second of what will train, as 1.5e14; of each rank")
      ->check(CLI::PositiveNumber);
  verb->add_option("--ranks", options->given.ranks, "Processes that will train together (default: 1)")
      ->check(CLI::PositiveNumber);
  verb->add_option("--gpu", options->gpu, "Memory of a GPU, as 80GB: ranks are GPUs, and whether it fits is said");
  verb->add_option("--link", options->link, "What a rank sends in a second, as 50GB");
  verb->add_flag("--no-probe", options->no_probe, "No time from a few short steps on this machine");
  verb->add_option("--threads", options->threads, "Cores to use (default: all)")->check(CLI::PositiveNumber);
  verb->add_flag("--json", options->json, "For programs");
  verb->footer(
      "example: tapetune plan llama2-7b-8k/tape model=/models/Llama-2-7b-hf shard=base --ranks 8 --gpu 80GB --flops "
      "1.5e14");
  verb->callback([options] {
    if (options->threads > 0) at::set_num_threads(options->threads);
    const Recipe recipe = read_recipe(find_recipe(options->recipe), options->words);
    Given& given = options->given;
    if (!options->gpu.empty()) given.gpu = static_cast<double>(parse_size(options->gpu));
    if (!options->link.empty()) given.link = static_cast<double>(parse_size(options->link));
    Plan plan = make_plan(recipe, {given.ranks, given.gpu > 0});
    if (given.flops > 0) {
      plan.step_seconds = step_seconds(plan, given);
    } else if (!options->no_probe && given.ranks == 1 && given.gpu <= 0) {
      plan.step_seconds = probe_step(recipe);
    }
    if (options->json) {
      fmt::print("{}\n", to_text(json_of(plan, recipe), 2));
    } else {
      print_table(plan, recipe, given);
    }
  });
}

}  // namespace tapetune::cli
