#include "plan/plan.h"

#include <ATen/Parallel.h>
#include <CLI/CLI.hpp>

#include "cli/numbers.h"
#include "cli/options.h"
#include "cli/verbs.h"
#include "core/digits.h"
#include "core/json.h"
#include "core/output.h"
#include "distributed/mesh.h"
#include "recipe/shipped.h"

namespace tapetune::cli {

namespace {

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
  const auto row = [](std::string_view key, const std::string& value) { print_out("{:<20} {:>16}\n", key, value); };
  row("parameters", count(plan.parameters));
  row("trainable", count(plan.trained));
  for (const auto& [part, n] : plan.trained_by_part) row("  " + part, count(n));
  row(given.ranks > 1 ? "memory per rank" : "memory", bytes_text(plan.peak_memory()));
  for (const auto& [part, bytes] : plan.memory) row("  " + part, bytes_text(bytes));
  row("disk", bytes_text(plan.disk_bytes));
  row("  per checkpoint", bytes_text(plan.checkpoint_bytes));
  row("tokens", count(plan.tokens));
  row("  per step", count(recipe.batch * recipe.context));
  if (plan.epochs) row("  epochs", fmt::format("{:.2f}", *plan.epochs));
  row("FLOPs per step", fmt::format("{:.3g}", plan.step_flops));
  if (given.ranks > 1) {
    const StepTraffic& sent = plan.traffic;
    row("sent per rank, step", bytes_text(sent.gradients + sent.weights + sent.values + sent.sequence));
    for (const auto& [part, bytes] : {std::pair("  gradients", sent.gradients), std::pair("  weights", sent.weights),
                                      std::pair("  values", sent.values), std::pair("  sequence", sent.sequence)}) {
      if (bytes > 0) row(part, bytes_text(bytes));
    }
  }
  if (plan.step_seconds) {
    row(given.flops > 0 ? "time (from --flops)" : "time (measured)",
        time_text(*plan.step_seconds * static_cast<double>(recipe.steps)));
    row("  per step", time_text(*plan.step_seconds));
  }
  if (given.gpu > 0 && plan.peak_memory() > given.gpu) {
    // Only what the recipe does not have yet.
    std::vector<std::string> ways;
    if (recipe.shard != "base" && given.ranks > 1) ways.emplace_back("shard=base");
    if (recipe.checkpointing != Checkpointing::full) ways.emplace_back("checkpointing=full");
    if (share_batch(recipe, given.ranks).micro_batch > 1) ways.emplace_back("a smaller micro_batch");
    if (recipe.sequence_parallel < given.ranks) ways.emplace_back("a larger sequence_parallel");
    ways.push_back(given.ranks > 1 || recipe.shard == "base" ? "more --ranks" : "several --ranks with shard=base");
    print_out("does not fit {}: try {}\n", bytes_text(given.gpu), fmt::join(ways, ", "));
  }
}

// All-reduces of gradients and all-gathers of weights overlap computation; the all-to-alls of sequence parallel do not.
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
    std::vector<std::string> overrides;
    Given given;
    bool no_probe = false, json = false;
    int threads = 0;
  };
  const auto options = std::make_shared<Options>();
  CLI::App* verb = app.add_subcommand(
      "plan", "What a recipe needs: parameters, memory, disk, tokens, time; the model's config.json is enough");
  verb->add_option("recipe", options->recipe, "A recipe file, or the name of a shipped one")->required();
  verb->add_option("settings", options->overrides, "key=value overrides: model, data, context, batch, …");
  verb->add_option("--flops", options->given.flops, "Operations per second of each rank, as 1.5e14 or 150T")
      ->transform(amount());
  verb->add_option("--ranks", options->given.ranks, "Processes that will train together (default: 1)")
      ->transform(whole_number(1));
  verb->add_option("--gpu", options->given.gpu,
                   "Memory of a GPU, as 80GB: ranks are GPUs, and plan says whether it fits")
      ->transform(bytes());
  verb->add_option("--link", options->given.link, "Bytes that a rank sends per second, as 50GB")->transform(bytes());
  verb->add_flag("--no-probe", options->no_probe, "Do not time a few short steps on this machine");
  verb->add_option("--threads", options->threads, "CPU threads (default: all cores)")->transform(thread_count());
  verb->add_flag("--json", options->json, "The plan as JSON");
  verb->footer(
      "example: tapetune plan llama2-7b-8k/tape model=/models/Llama-2-7b-hf shard=base --ranks 8 --gpu 80GB --flops "
      "1.5e14");
  verb->callback([options] {
    if (options->threads > 0) at::set_num_threads(options->threads);
    const Recipe recipe = read_recipe(find_recipe(options->recipe), options->overrides);
    const Given& given = options->given;
    Plan plan = make_plan(recipe, {given.ranks, given.gpu > 0});
    if (given.flops > 0) {
      plan.step_seconds = step_seconds(plan, given);
    } else if (!options->no_probe && given.ranks == 1 && given.gpu <= 0) {
      plan.step_seconds = probe_step(recipe);
    }
    if (options->json) {
      print_out("{}\n", to_text(json_of(plan, recipe), 2));
    } else {
      print_table(plan, recipe, given);
    }
  });
}

}  // namespace tapetune::cli
