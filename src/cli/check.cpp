#include <CLI/CLI.hpp>

#include "adapters/component.h"
#include "checkpoint/writer.h"
#include "cli/numbers.h"
#include "cli/options.h"
#include "cli/verbs.h"
#include "core/error.h"
#include "core/file.h"
#include "core/json.h"
#include "core/output.h"
#include "eval/shift.h"
#include "hf/tokenizer.h"
#include "model/loss.h"

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
  const at::Tensor all = at::tensor(tokens, at::kLong);
  const std::int64_t length = all.size(0);
  ForwardInput in;
  in.tokens = all.unsqueeze(0);
  in.training = Training{parse_checkpointing(options.checkpointing), options.model.seed, /*dropout=*/false};
  const at::Tensor hidden = adapted.model.forward(in).last[0];  // [N, hidden]
  const at::Tensor loss = loss_sum(adapted.model, hidden.narrow(0, 0, length - 1), all.narrow(0, 1, length - 1)) /
                          static_cast<double>(length - 1);
  loss.backward();
  std::map<std::string, at::Tensor> tensors{{"loss", loss.detach()}};
  for (const Parameter& p : adapted.parameters) {
    if (p.value.grad().defined()) tensors["grad." + p.name] = p.value.grad();
  }
  save_safetensors(options.out, tensors, options.force);
}

struct Shift {
  ModelOptions model;
  std::string text, tokens;
  std::int64_t by = 3;
  double spread = 0.02;
  bool json = false;
};

// A method that starts as the base model shows nothing yet: parameters at zero get random values.
void draw_zeros(const AdaptedModel& adapted, double spread, std::uint64_t seed) {
  const c10::NoGradGuard drawing;
  at::manual_seed(seed);
  for (const Parameter& p : adapted.parameters) {
    if (p.value.count_nonzero().item<std::int64_t>() == 0) p.value.normal_(0, spread);
  }
}

// The encoding to show where none is asked for: one whose invariance has a counterexample.
std::string_view shown_encoding() {
  const auto& all = position_components().all();
  return std::ranges::find_if(all, [](const PositionComponent& each) { return !each.ablation.empty(); })->name;
}

// With one of its positions' settings, "key=value".
MethodOptions with_setting(MethodOptions method, std::string_view setting) {
  const std::size_t equals = setting.find('=');
  set_setting(method, Section::positions, setting.substr(0, equals), setting.substr(equals + 1));
  return method;
}

void run_shift(const Shift& options) {
  const c10::NoGradGuard evaluation;
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

  std::vector<std::pair<std::string, AdaptedModel>> models;
  ModelOptions plain = options.model;
  plain.adapter.clear();
  plain.method.clear();
  models.emplace_back("RoPE", plain.load(checkpoint));
  const bool given = !options.model.adapter.empty() || !options.model.method.empty();
  ModelOptions adapted = options.model;
  if (!given) adapted.method = {std::string(shown_encoding())};
  models.emplace_back("", adapted.load(checkpoint));
  const MethodOptions& method = models.back().second.options;
  const PositionComponent& encoding = position_component(method, checkpoint.config());
  models.back().first = encoding.ablation.empty() ? method.name() : std::string(encoding.title);
  if (!encoding.ablation.empty() && method == with_setting(method, encoding.ablation)) {
    models.back().first = encoding.ablated;
  } else if (!encoding.ablation.empty() && adapted.adapter.empty()) {
    ModelOptions broken = adapted;
    broken.method.emplace_back(encoding.ablation);
    models.emplace_back(encoding.ablated, broken.load(checkpoint));
  }
  if (adapted.adapter.empty()) {
    for (std::size_t i = 1; i < models.size(); ++i) draw_zeros(models[i].second, options.spread, options.model.seed);
  }

  const std::int64_t front = checkpoint.config().bos.value_or(tokens.front());
  const char* kinds[] = {"add tokens", "shift ids"};
  Json report;
  for (const auto& [name, model] : models) {
    for (const char* kind : kinds) {
      const ShiftDifference d = kind == kinds[0] ? added_tokens(model.model, tokens, front, options.by)
                                                 : shifted_ids(model.model, tokens, options.by);
      Json layers = Json::array();
      for (const ShiftedLayer& layer : d.layers) {
        layers.push_back({{"attention", layer.attention}, {"position", layer.position}});
      }
      report[name][kind] = {{"layers", layers}, {"logits", d.logits}};
    }
  }
  if (options.json) {
    print_out("{}\n", to_text(report, 2));
    return;
  }
  print_out("{} tokens; added in front: {} of token {}; ids shifted by {}.\n", tokens.size(), options.by, front,
            options.by);
  print_out("attention: mean difference of weights; positions: of dot products of position states.\n");
  for (const char* kind : kinds) {
    print_out("\n{:<11}", kind);
    for (const auto& [name, result] : report.items()) print_out("  {:>25}", name);
    print_out("\n{:<11}", "layer");
    for (std::size_t i = 0; i < report.size(); ++i) print_out("  {:>12} {:>12}", "attention", "positions");
    print_out("\n");
    const std::size_t layers = report.begin().value()[kind]["layers"].size();
    for (std::size_t layer = 0; layer < layers; ++layer) {
      print_out("{:<11}", layer);
      for (const auto& [name, result] : report.items()) {
        const Json& row = result[kind]["layers"][layer];
        print_out("  {:>12.3g} {:>12.3g}", row["attention"].get<double>(), row["position"].get<double>());
      }
      print_out("\n");
    }
    print_out("{:<11}", "logits");
    for (const auto& [name, result] : report.items()) print_out("  {:>25.3g}", result[kind]["logits"].get<double>());
    print_out("\n");
  }
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
