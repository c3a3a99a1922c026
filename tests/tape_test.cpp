// TAPE against its authors' numbers, against an independent reference, and against its promise: only differences of
// positions matter.
#include <c10/core/InferenceMode.h>

#include "adapters/build_model.h"
#include "adapters/checkpoints.h"
#include "catch.h"
#include "eval/shift.h"
#include "model/loss.h"
#include "support.h"

namespace tape_test {

using namespace tapetune;
using namespace tapetune::test;

namespace {

double relative(const at::Tensor& a, const at::Tensor& b) {
  return largest_difference(a, b) / std::max(b.abs().max().item<double>(), 1e-12);
}

// Every weight of the model asks for a gradient; the names are the checkpoint's.
LlamaWeights trained_weights(const Checkpoint& checkpoint, std::map<std::string, at::Tensor>& by_name) {
  LlamaWeights w = map_weights(checkpoint);
  const auto train = [&](const std::string& name, at::Tensor& t) {
    t = t.clone().requires_grad_(true);
    by_name[name] = t;
  };
  train("model.embed_tokens.weight", w.embedding);
  for (std::size_t i = 0; i < w.layers.size(); ++i) {
    const std::string name = fmt::format("model.layers.{}.", i);
    LayerWeights& layer = w.layers[i];
    train(name + "input_layernorm.weight", layer.input_norm);
    train(name + "post_attention_layernorm.weight", layer.post_attention_norm);
    const std::pair<const char*, Linear*> linears[] = {{"self_attn.q_proj", &layer.q}, {"self_attn.k_proj", &layer.k},
                                                       {"self_attn.v_proj", &layer.v}, {"self_attn.o_proj", &layer.o},
                                                       {"mlp.gate_proj", &layer.gate}, {"mlp.up_proj", &layer.up},
                                                       {"mlp.down_proj", &layer.down}};
    for (const auto& [part, linear] : linears) train(name + part + ".weight", linear->weight);
  }
  train("model.norm.weight", w.norm);
  train("lm_head.weight", w.head.weight);
  return w;
}

void set(const AdaptedModel& adapted, const std::function<at::Tensor(const std::string&)>& value) {
  const c10::NoGradGuard setting;
  for (const Parameter& p : adapted.parameters) p.value.copy_(value(p.name));
}

at::Tensor mean_loss(const Llama& model, const at::Tensor& hidden, const at::Tensor& batch) {
  const std::int64_t last = batch.size(1) - 1;
  return loss_sum(model, hidden.narrow(1, 0, last).flatten(0, 1), batch.narrow(1, 1, last).flatten()) /
         static_cast<double>(batch.size(0) * last);
}

// Random position weights of a size that makes the updates matter.
AdaptedModel random_tape(const std::vector<std::string>& words, at::ScalarType dtype) {
  const ModelConfig config = random_config(false);
  AdaptedModel adapted = adapt(config, random_weights(config, at::kDouble), parse_method("tape", words), dtype);
  at::manual_seed(9);
  set(adapted, [&](const std::string& name) {
    for (const Parameter& p : adapted.parameters) {
      if (p.name == name) return at::randn(p.value.sizes(), at::kDouble) * 0.2;
    }
    return at::Tensor();
  });
  return adapted;
}

double shifted(const AdaptedModel& adapted, std::int64_t by) {
  const c10::NoGradGuard evaluation;
  std::vector<std::int64_t> tokens;
  for (std::int64_t i = 0; i < 24; ++i) tokens.push_back((i * 17 + 3) % 61);
  return shifted_ids(adapted.model, tokens, by).logits;
}

// The numbers that the authors' code computed for the checkpoint in `folder`, which it wrote.
void equals_authors(const std::filesystem::path& folder) {
  const Checkpoint checkpoint = open_checkpoint(folder);
  const auto expected = load_tensors(folder / "expected.safetensors");
  for (const Checkpointing mode : {Checkpointing::off, Checkpointing::full, Checkpointing::selective}) {
    std::map<std::string, at::Tensor> by_name;
    const LlamaWeights weights = trained_weights(checkpoint, by_name);
    const AdaptedModel adapted =
        adapt(checkpoint.config(), weights, parse_method("tape", std::vector<std::string>{"mix=per-head"}), at::kFloat);
    set(adapted, [&](const std::string& parameter) { return checkpoint.tensor(parameter); });
    for (const Parameter& p : adapted.parameters) by_name[p.name] = p.value;

    ForwardInput in;
    in.tokens = expected.at("input_ids").to(at::kLong);
    in.all_hidden = true;
    in.training = Training{mode, 0};
    const ForwardOutput out = adapted.model.forward(in);
    CHECK(relative(adapted.model.logits(out.last).detach(), expected.at("logits")) < 1e-4);
    for (std::size_t k = 0; k < out.hidden.size(); ++k) {
      INFO(folder << ", hidden state " << k);
      CHECK(relative(out.hidden[k].detach(), expected.at(fmt::format("hidden.{}", k))) < 1e-4);
    }
    const at::Tensor loss = mean_loss(adapted.model, out.last, in.tokens);
    CHECK(std::abs(loss.item<double>() - expected.at("loss").item<double>()) < 1e-5);
    loss.backward();
    std::size_t compared = 0;
    for (const auto& [parameter, value] : by_name) {
      INFO(folder << ", gradient of " << parameter);
      const auto found = expected.find("grad." + parameter);
      REQUIRE((found != expected.end()) == value.grad().defined());
      if (found == expected.end()) continue;
      CHECK(relative(value.grad(), found->second) < 1e-4);
      ++compared;
    }
    CHECK(compared > 35);
  }
}

}  // namespace

TEST_CASE("TAPE: logits, hidden states and gradients equal the authors' code") {
  equals_authors(data("tape-official-a"));
}

TEST_CASE("TAPE: linear scaling and another rope_theta equal the authors' code") {
  const auto folder = shared("golden/tape-official-b");
  if (!folder.empty()) equals_authors(folder);
}

TEST_CASE("TAPE and LongLoRA: the first loss, gradient norm and gradients of the reference trajectories") {
  const auto base = shared("data/stories260K");
  for (const std::string method : {"tape", "longlora"}) {
    const auto file = shared("golden/trajectories/" + method + ".safetensors");
    if (file.empty() || base.empty()) return;
    const Checkpoint checkpoint = open_checkpoint(base);
    const auto golden = load_tensors(file);
    const std::vector<std::string> words{"train_also=embeddings,norms", "scaling=linear", "factor=4"};
    const AdaptedModel adapted =
        adapt(checkpoint.config(), map_weights(checkpoint), parse_method(method, words), at::kFloat);
    set(adapted, [&](const std::string& name) { return golden.at("init." + name); });
    ForwardInput in;
    in.tokens = golden.at("batches")[0].to(at::kLong);
    in.training = Training{Checkpointing::selective, 0};
    const at::Tensor loss = mean_loss(adapted.model, adapted.model.forward(in).last, in.tokens);
    loss.backward();
    CHECK(std::abs(loss.item<double>() - golden.at("losses_f64")[0].item<double>()) < 5e-6);
    double squares = 0;
    for (const Parameter& p : adapted.parameters) {
      INFO(method << ": " << p.name);
      const auto found = golden.find("grad1." + p.name);
      if (found == golden.end()) {
        CHECK_FALSE(p.value.grad().defined());
        continue;
      }
      const at::Tensor gradient = p.value.grad().defined() ? p.value.grad() : at::zeros_like(p.value);
      if (found->second.abs().max().item<double>() > 0) CHECK(relative(gradient, found->second) < 1e-4);
      squares += gradient.square().sum().item<double>();
    }
    const double norm = golden.at("grad_norms_f64")[0].item<double>();
    CHECK(std::abs(std::sqrt(squares) - norm) < 1e-4 * norm);
  }
}

TEST_CASE("TAPE: shifting all positions changes nothing, unless equivariance is broken") {
  for (const std::vector<std::string>& words : std::vector<std::vector<std::string>>{
           {}, {"mix=per-head"}, {"scaling=linear", "factor=2"}, {"scaling=yarn", "factor=4"}, {"rank=2"}}) {
    const AdaptedModel adapted = random_tape(words, at::kDouble);
    for (const std::int64_t by : {3, 1000}) {
      INFO((words.empty() ? "plain" : words[0]) << " by " << by);
      CHECK(shifted(adapted, by) < 1e-9);
    }
  }
  // The check can fail: matrices of their own for the sines break what it looks for.
  CHECK(shifted(random_tape({"equivariant=false"}, at::kDouble), 3) > 1e-3);
  CHECK(shifted(random_tape({}, at::kFloat), 3) < 1e-3);
}

TEST_CASE("TAPE: trained positions shift in f32 with hardly a difference") {
  const auto base = shared("data/stories260K"), file = shared("golden/trajectories/tape.safetensors");
  if (base.empty() || file.empty()) return;
  const Checkpoint checkpoint = open_checkpoint(base);
  const auto golden = load_tensors(file);
  const std::vector<std::string> words{"train_also=embeddings,norms", "scaling=linear", "factor=4"};
  const AdaptedModel adapted =
      adapt(checkpoint.config(), map_weights(checkpoint), parse_method("tape", words), at::kFloat);
  set(adapted, [&](const std::string& name) { return golden.at("final." + name); });
  const c10::NoGradGuard evaluation;
  const at::Tensor row = golden.at("batches")[0][0].narrow(0, 0, 200).to(at::kLong).contiguous();
  const std::vector<std::int64_t> tokens(row.const_data_ptr<std::int64_t>(), row.const_data_ptr<std::int64_t>() + 200);
  CHECK(shifted_ids(adapted.model, tokens, 3).logits < 1e-3);
  CHECK(shifted_ids(adapted.model, tokens, 1000).logits < 1e-3);
}

TEST_CASE("TAPE: a random offset exercises only the numbers") {
  const AdaptedModel adapted = random_tape({"random_offset=true"}, at::kDouble);
  const c10::NoGradGuard evaluation;
  const auto logits = [&](std::optional<Training> training) {
    ForwardInput in;
    in.tokens = at::arange(20).unsqueeze(0);
    in.training = training;
    in.all_positions = true;
    const ForwardOutput out = adapted.model.forward(in);
    return std::pair(adapted.model.logits(out.last), out.positions[0]);
  };
  const auto [plain, from_zero] = logits(std::nullopt);
  const auto [moved, from_elsewhere] = logits(Training{Checkpointing::off, 4});
  CHECK(largest_difference(from_zero, from_elsewhere) > 0.1);
  CHECK(largest_difference(plain, moved) < 1e-9);
}

TEST_CASE("TAPE: the update of the attention mixes heads in full, or each for itself") {
  // With one layer before the last, what differs is visible in the second layer's position state.
  const ModelConfig config = random_config(false);
  const LlamaWeights weights = random_weights(config, at::kDouble);
  const auto state = [&](const std::string& mix, const at::Tensor& w) {
    const AdaptedModel adapted =
        adapt(config, weights, parse_method("tape", std::vector<std::string>{mix}), at::kDouble);
    set(adapted, [&](const std::string& name) {
      for (const Parameter& p : adapted.parameters) {
        if (p.name == name) return name == "model.layers.0.post_attention_linear.weight" ? w : p.value.detach().clone();
      }
      return at::Tensor();
    });
    const c10::NoGradGuard evaluation;
    ForwardInput in;
    in.tokens = at::arange(12).unsqueeze(0);
    in.all_positions = true;
    return adapted.model.forward(in).positions[1];  // [1, N, 2, D]
  };
  const at::Tensor w = at::randn({2, 4}, at::kDouble), zero = at::zeros({2, 4}, at::kDouble);
  const at::Tensor start = state("mix=full", zero);
  // Per head only the sum of a row acts: any row with the same sum gives the same.
  const at::Tensor spread = w.sum(1, true).expand({2, 4}) / 4;
  CHECK(largest_difference(state("mix=per-head", w), state("mix=per-head", spread)) < 1e-12);
  CHECK(largest_difference(state("mix=full", w), state("mix=full", spread)) > 1e-2);
  // And it is the full form with each channel reading the mean of its own heads.
  const at::Tensor own = at::tensor({1, 1, 0, 0, 0, 0, 1, 1}, at::kDouble).view({2, 4}) / 2;
  CHECK(largest_difference(state("mix=per-head", w), state("mix=full", w.sum(1, true) * own)) < 1e-12);
  CHECK(largest_difference(state("mix=full", w), start) > 1e-2);
}

}  // namespace tape_test
