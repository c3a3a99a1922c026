#include <CLI/CLI.hpp>

#include "checkpoint/writer.h"
#include "cli/numbers.h"
#include "cli/options.h"
#include "cli/verbs.h"
#include "core/error.h"
#include "core/file.h"
#include "core/json.h"
#include "core/output.h"
#include "eval/gradients.h"
#include "eval/shift.h"
#include "hf/tokenizer.h"

namespace tapetune::cli {

namespace {

struct Gradients {
  ModelOptions model;
  std::string tokens, out;
  std::string checkpointing = "off";
  bool force = false;
};

void run_gradients(const Gradients& options) {
  require_writable(options.out, options.force);
  require_not_input(options.out, std::vector<std::filesystem::path>{options.model.folder, options.model.adapter});
  const Checkpoint checkpoint = options.model.open();
  const std::vector<std::int64_t> tokens = parse_tokens(options.tokens, "--tokens");
  if (tokens.size() < 2) fail("check", "a loss needs two tokens at least, but there is {}.", tokens.size());
  const AdaptedModel adapted = options.model.load(checkpoint, /*train_all=*/true);
  if (adapted.parameters.empty())
    fail("check", "method {} has no trainable parameters; choose another.", adapted.options.name());
  save_safetensors(options.out,
                   loss_and_gradients(adapted, tokens, parse_checkpointing(options.checkpointing), options.model.seed),
                   options.force);
}

struct Shift {
  ModelOptions model;
  std::string text, tokens;
  std::int64_t by = 3;
  double spread = 0.02;
  bool json = false;
};

void print_differences(const char* kind, const std::vector<ShiftResult>& results,
                       ShiftDifference ShiftResult::* difference) {
  print_out("\n{:<11}", kind);
  for (const ShiftResult& each : results) print_out("  {:>25}", each.model);
  print_out("\n{:<11}", "layer");
  for (std::size_t i = 0; i < results.size(); ++i) print_out("  {:>12} {:>12}", "attention", "positions");
  print_out("\n");
  const std::size_t layers = (results.front().*difference).layers.size();
  for (std::size_t i = 0; i < layers; ++i) {
    print_out("{:<11}", i);
    for (const ShiftResult& each : results) {
      const ShiftedLayer& layer = (each.*difference).layers[i];
      print_out("  {:>12.3g} {:>12.3g}", layer.attention, layer.position);
    }
    print_out("\n");
  }
  print_out("{:<11}", "logits");
  for (const ShiftResult& each : results) print_out("  {:>25.3g}", (each.*difference).logits);
  print_out("\n");
}

void run_shift(const Shift& options) {
  const Checkpoint checkpoint = options.model.open();
  std::vector<std::int64_t> tokens;
  if (!options.tokens.empty()) {
    tokens = parse_tokens(options.tokens, "--tokens");
  } else {
    tokens = Tokenizer::open(checkpoint.path()).encode(options.text);
  }
  if (tokens.empty()) fail("check", "the text has no tokens; give a longer one.");
  if (tokens.size() > 512)
    fail("check", "{} tokens are too many for full attention matrices; give 512 at most.", tokens.size());

  ShiftModels models;
  models.load = [&](const std::vector<std::string>& method) {
    ModelOptions fresh = options.model;
    fresh.adapter.clear();
    fresh.method = method;
    return fresh.load(checkpoint);
  };
  if (!options.model.adapter.empty()) models.load_trained = [&] { return options.model.load(checkpoint); };
  models.method = options.model.method;
  models.spread = options.spread;
  models.seed = options.model.seed;
  const std::int64_t front = checkpoint.config().bos.value_or(tokens.front());
  const std::vector<ShiftResult> results =
      measure_shifts(shift_models(checkpoint.config(), models), tokens, front, options.by);
  if (options.json) {
    print_out("{}\n", to_text(shift_json(results), 2));
    return;
  }
  print_out("{} tokens; added in front: {} of token {}; ids shifted by {}.\n", tokens.size(), options.by, front,
            options.by);
  print_out("attention: mean difference of weights; positions: of dot products of position states.\n");
  print_differences("add tokens", results, &ShiftResult::added);
  print_differences("shift ids", results, &ShiftResult::shifted);
}

}  // namespace

void add_check(CLI::App& app) {
  CLI::App* verb =
      app.add_subcommand("check", "Check a method: its gradients, and whether it is invariant to position shifts");
  verb->require_subcommand(1);
  verb->footer("example: tapetune check shift /models/Llama-2-7b-hf --method tape");

  const auto gradients = std::make_shared<Gradients>();
  CLI::App* grad = verb->add_subcommand("gradients", "Write loss and gradients of a text to a safetensors file");
  gradients->model.add_to(*grad);
  grad->add_option("--tokens", gradients->tokens, "Token ids, as 1,2,3")->required();
  grad->add_option("--checkpointing", gradients->checkpointing, "off, full or selective")
      ->check(CLI::IsMember({"off", "full", "selective"}));
  grad->add_option("--out", gradients->out, "File to write: loss [] and grad.NAME of every trained parameter")
      ->required();
  grad->add_flag("--force", gradients->force, "Replace an existing file");
  grad->footer(
      "example: tapetune check gradients /models/Llama-2-7b-hf --adapter lora/ --tokens 1,15043,3186 --out "
      "g.safetensors");
  grad->callback([gradients] { run_gradients(*gradients); });

  const auto shift = std::make_shared<Shift>();
  CLI::App* moved = verb->add_subcommand(
      "shift", "Measure how attention and position states change when a text is shifted, by layer");
  shift->model.add_to(*moved);
  auto* input = moved->add_option_group("text", "Text (one of)");
  input->add_option("--text", shift->text, "Text to shift");
  input->add_option("--tokens", shift->tokens, "Token ids, as 1,2,3 (needs no tokenizer)");
  input->require_option(0, 1);
  shift->text = "The quick brown fox jumps over the lazy dog while the old clock in the hall strikes twelve times.";
  moved->add_option("--by", shift->by, "Shift in tokens: tokens put in front, or added to position ids (default: 3)")
      ->transform(whole_number(1));
  moved->add_option("--spread", shift->spread,
                    "Standard deviation of the noise put on zero-initialized parameters (default: 0.02)");
  moved->add_flag("--json", shift->json, "Print the results as JSON");
  moved->footer("example: tapetune check shift /models/Llama-2-7b-hf --method tape --by 3");
  moved->callback([shift] { run_shift(*shift); });
}

}  // namespace tapetune::cli
