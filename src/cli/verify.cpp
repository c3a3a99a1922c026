#include "merge/verify.h"

#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>
#include <CLI/CLI.hpp>

#include "cli/options.h"
#include "cli/verbs.h"
#include "core/error.h"

namespace tapetune::cli {

namespace {

void print_names(std::string_view what, const std::vector<std::string>& names) {
  constexpr std::size_t shown = 5;
  if (names.empty()) return;
  fmt::print("{}: {}\n", what, names.size());
  for (std::size_t i = 0; i < std::min(shown, names.size()); ++i) fmt::print("  {}\n", names[i]);
  if (names.size() > shown) fmt::print("  and {} more\n", names.size() - shown);
}

void print_result(const Verification& result) {
  print_names("only in A", result.only_a);
  print_names("only in B", result.only_b);
  print_names("of another dtype or shape", result.unlike);
  fmt::print("tensors   {} compared, {} identical to the last bit\n", result.compared, result.identical);
  if (result.identical < result.compared) {
    fmt::print("          largest difference {:.3g} in {}\n", result.worst_absolute.absolute,
               result.worst_absolute.name);
    fmt::print("          largest against the tensor's largest number {:.3g} in {}\n", result.worst_relative.relative,
               result.worst_relative.name);
  }
  fmt::print("logits    of {} tokens: largest difference {:.3g}, largest logit {:.3g}; {} times the same next token\n",
             result.tokens, result.logits_difference, result.largest_logit, result.same_next);
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
  CLI::App* verb = app.add_subcommand("verify", "Whether two models are the same; exit 1 where they are not");
  verb->add_option("a", options->a, "Folder of a checkpoint, of a run, or of an adapter")->required();
  verb->add_option("b", options->b, "Folder of the other")->required();
  verb->add_option("--model", options->model, "The base model's folder, for an adapter (or a run whose base moved)");
  CLI::Option* prompt = verb->add_option("--prompt", options->verify.prompt, "Text whose logits are compared");
  verb->add_option("--tokens", options->tokens, "Token ids instead: 1,2,3 (default: 64 of all the vocabulary)")
      ->excludes(prompt);
  verb->add_option("--tolerance", options->verify.tolerance, "Largest difference of a tensor's numbers (default 0)")
      ->check(CLI::NonNegativeNumber);
  verb->add_option("--logits-tolerance", options->logits_tolerance,
                   "Of the logits, as a share of the largest (default: 1e-4, or 0.05 where weights are bf16 or f16)")
      ->check(CLI::NonNegativeNumber);
  verb->add_option("--threads", options->threads, "Cores to use (default: all)")->check(CLI::PositiveNumber);
  verb->add_flag("--json", options->json, "The result as JSON");
  verb->footer("example: tapetune verify runs/lora models/lora-8k");
  verb->callback([options] {
    const c10::InferenceMode inference;
    if (options->threads > 0) at::set_num_threads(options->threads);
    VerifyOptions& verifying = options->verify;
    verifying.a = options->a;
    verifying.b = options->b;
    verifying.model = options->model;
    if (!options->tokens.empty()) verifying.tokens = parse_tokens(options->tokens, "--tokens");
    if (options->logits_tolerance >= 0) verifying.logits_tolerance = options->logits_tolerance;
    const Verification result = verify(verifying);
    if (options->json) {
      fmt::print("{}\n", to_text(verification_json(result), 2));
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
