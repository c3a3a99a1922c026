#include "export/verify.h"

#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>
#include <CLI/CLI.hpp>

#include "cli/numbers.h"
#include "cli/options.h"
#include "cli/verbs.h"
#include "core/error.h"
#include "core/output.h"
#include "run/open.h"
#include "run/verify_run.h"

namespace tapetune::cli {

namespace {

void print_names(std::string_view what, const std::vector<std::string>& names) {
  constexpr std::size_t shown = 5;
  if (names.empty()) return;
  print_out("{}: {}\n", what, names.size());
  for (std::size_t i = 0; i < std::min(shown, names.size()); ++i) print_out("  {}\n", names[i]);
  if (names.size() > shown) print_out("  and {} more\n", names.size() - shown);
}

void print_result(const Verification& result) {
  print_names("only in A", result.only_a);
  print_names("only in B", result.only_b);
  print_names("dtype or shape differs", result.unlike);
  print_out("tensors   {} compared, {} bit-identical\n", result.compared, result.identical);
  if (result.identical < result.compared) {
    print_out("          largest difference {:.3g} in {}\n", result.worst_absolute.absolute,
              result.worst_absolute.name);
    print_out("          largest relative difference {:.3g} in {}\n", result.worst_relative.relative,
              result.worst_relative.name);
  }
  print_out(
      "logits    of {} tokens: largest difference {:.3g}, largest logit {:.3g}; same most likely token after {}\n",
      result.tokens, result.logits_difference, result.largest_logit, result.same_next);
}

void verify_run_folder(const std::string& run, bool json) {
  std::error_code status;
  if (!std::filesystem::exists(run, status)) fail("verify", "{}: no such folder.", run);
  if (!is_run(run)) {
    fail("verify", "{}: is not a training run (it has no recipe.yaml); give a second model to compare it with.", run);
  }
  const std::vector<RunCheck> checks = verify_run(run);
  const RunCheck* first = nullptr;
  std::size_t damaged = 0;
  for (const RunCheck& check : checks) {
    if (!json) print_out("{:<9}  {:<27}  {}\n", check_state_name(check.state), check.part, check.detail);
    if (check.state != RunCheck::State::damaged) continue;
    if (first == nullptr) first = &check;
    ++damaged;
  }
  if (json) print_out("{}\n", to_text(run_checks_json(checks), 2));
  if (first == nullptr) return;
  std::fflush(stdout);
  fail("verify", "{}: {} of {} parts {} damaged; the first is {}: {}.", run, damaged, checks.size(),
       damaged == 1 ? "is" : "are", first->part, first->detail);
}

}  // namespace

void add_verify(CLI::App& app) {
  struct Options {
    VerifyOptions verify;
    std::string a, b, model, tokens;
    double logits_tolerance = -1;
    int threads = 0;
    bool json = false;
  };
  const auto options = std::make_shared<Options>();
  CLI::App* verb = app.add_subcommand(
      "verify",
      "Compare two models, tensors and logits; or check a run folder. Exit 1 if they differ or it is damaged");
  verb->add_option("a", options->a, "Folder of a checkpoint, of a run, or of an adapter")->required();
  verb->add_option("b", options->b, "Folder of the other model; without it, all files of the run A are checked");
  verb->add_option("--model", options->model, "The base model's folder, for an adapter (or a run whose base moved)");
  CLI::Option* prompt = verb->add_option("--prompt", options->verify.prompt, "Text whose logits are compared");
  verb->add_option("--tokens", options->tokens, "Token ids instead, as 1,2,3 (default: 64 from the whole vocabulary)")
      ->excludes(prompt);
  verb->add_option("--tolerance", options->verify.tolerance, "Largest difference between tensor values (default: 0)")
      ->transform(amount());
  verb->add_option(
          "--logits-tolerance", options->logits_tolerance,
          "Largest difference between logits, relative to the largest (default: 1e-4; 0.05 for bf16 and f16 weights)")
      ->transform(amount());
  verb->add_option("--threads", options->threads, "CPU threads (default: all cores)")->transform(thread_count());
  verb->add_flag("--json", options->json, "Print the result as JSON");
  verb->footer(
      "example: tapetune verify runs/lora models/lora-8k\n"
      "         tapetune verify runs/lora");
  verb->callback([options] {
    const c10::InferenceMode inference;
    if (options->threads > 0) at::set_num_threads(options->threads);
    if (options->b.empty()) return verify_run_folder(options->a, options->json);
    VerifyOptions& verifying = options->verify;
    verifying.a = options->a;
    verifying.b = options->b;
    verifying.model = options->model;
    if (!options->tokens.empty()) verifying.tokens = parse_tokens(options->tokens, "--tokens");
    if (options->logits_tolerance >= 0) verifying.logits_tolerance = options->logits_tolerance;
    const Verification result = verify(verifying);
    if (options->json) {
      print_out("{}\n", to_text(verification_json(result), 2));
    } else {
      print_result(result);
    }
    if (result.agree()) return;
    std::fflush(stdout);
    fail("verify", "{} and {} are not the same: {}.", options->a, options->b,
         result.tensors_agree ? "the logits differ; compare the two config.json" : "their tensors differ");
  });
}

}  // namespace tapetune::cli
