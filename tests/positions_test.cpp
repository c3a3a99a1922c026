// Position encodings, windows and learned biases: the lab's reference numbers, who sees whom, and ranks that share a
// sequence.
#include <c10/core/InferenceMode.h>

#include "adapters/checkpoints.h"
#include "adapters/component.h"
#include "adapters/peft.h"
#include "catch.h"
#include "distributed/ulysses.h"
#include "model/loss.h"
#include "support.h"
#include "thread_ranks.h"
#include "train/adamw.h"
#include "training_setup.h"

namespace positions_test {

using namespace tapetune;
using namespace tapetune::test;

namespace {

// From tests/data, or for those that are not shipped from the golden folders beside the checkout.
std::filesystem::path lab(const std::string& name) {
  const std::filesystem::path shipped = data("lab") / name;
  return std::filesystem::exists(shipped) ? shipped : shared("golden/lab/" + name);
}

at::Tensor golden_loss(const Llama& model, const ForwardOutput& out, const at::Tensor& labels) {
  const std::int64_t last = labels.size(1) - 1;
  const at::Tensor targets = labels.narrow(1, 1, last);
  return loss_sum(model, out.last.narrow(1, 0, last), targets) / (targets >= 0).sum().to(out.last.scalar_type());
}

void equals_lab(const std::filesystem::path& folder, at::ScalarType dtype, Checkpointing checkpointing) {
  const bool exact = dtype == at::kDouble;
  const double values = exact ? 1e-12 : 3e-6, gradients = exact ? 1e-7 : 3e-5;
  const Checkpoint checkpoint = open_checkpoint(folder);
  const auto expected = load_tensors(folder / "expected.safetensors");
  const LlamaWeights weights = map_weights(checkpoint);
  const AdaptedModel adapted = open_adapted(checkpoint, weights, dtype, /*train_all=*/true);
  ForwardInput in;
  in.tokens = expected.at("input_ids");
  in.all_hidden = in.all_positions = true;
  in.training = Training{checkpointing};
  const ForwardOutput out = adapted.model.forward(in);
  CHECK(relative_difference(adapted.model.logits(out.last).detach(), expected.at("logits")) <= values);
  for (std::size_t i = 0; i < out.hidden.size(); ++i) {
    INFO("hidden state " << i);
    CHECK(relative_difference(out.hidden[i].detach(), expected.at(fmt::format("hidden.{}", i))) <= values);
  }
  std::size_t states = 0;
  for (std::size_t i = 0; i < out.positions.size(); ++i) {
    const auto found = expected.find(fmt::format("state.{}", i));
    if (found == expected.end()) continue;
    INFO("state of positions " << i);
    const at::Tensor& golden = found->second;  // [B, H, N, 2, D / 2]
    const at::Tensor own = out.positions[i].detach().transpose(1, 2).unflatten(3, {2, -1});
    CHECK(relative_difference(own.expand_as(golden), golden) <= values);
    ++states;
  }
  CHECK((states > 0) == (checkpoint.config().position == "tape"));
  const at::Tensor loss = golden_loss(adapted.model, out, expected.at("labels"));
  CHECK(std::abs(loss.item<double>() - expected.at("loss").item<double>()) <= values);
  loss.backward();
  std::size_t compared = 0;
  for (const Parameter& p : adapted.parameters) {
    INFO("gradient of " << p.name);
    const auto found = expected.find("grad." + p.name);
    REQUIRE((found != expected.end()) == p.value.grad().defined());
    if (found == expected.end()) continue;
    CHECK(relative_difference(p.value.grad(), found->second) <= gradients);
    ++compared;
  }
  const auto is_gradient = [](const auto& entry) { return entry.first.starts_with("grad."); };
  CHECK(compared == static_cast<std::size_t>(std::ranges::count_if(expected, is_gradient)));
}

// A position encoding that only tests have: a table of biases by distance that learns, for each layer its own.
class LearnedBias final : public PositionEncoding {
 public:
  explicit LearnedBias(std::vector<at::Tensor> tables) : tables_(std::move(tables)) {}
  PositionState start(const PositionInput&) const override { return {}; }
  std::int64_t same_length(const ModelConfig&, std::int64_t) const override { return 1; }
  at::Tensor score_bias(const BiasInput& in) const override {
    return tables_[static_cast<std::size_t>(in.layer)].narrow(1, 0, in.length).to(in.options);
  }

 private:
  std::vector<at::Tensor> tables_;
};

constexpr std::int64_t longest = 32;

AdaptedModel with_learned_bias(at::ScalarType dtype) {
  const ModelConfig config = random_config(false);
  at::manual_seed(4);
  Components components;
  std::vector<at::Tensor> tables;
  for (std::int64_t i = 0; i < config.layers; ++i) {
    tables.push_back(at::randn({config.heads, longest}, at::kDouble).to(dtype == at::kDouble ? dtype : at::kFloat));
    tables.back().requires_grad_(true);
    components.parameters.push_back(
        {fmt::format("model.layers.{}.self_attn.bias_table", i), tables.back(), "position", Owner::positions});
  }
  components.positions = std::make_shared<LearnedBias>(tables);
  std::vector<Parameter> parameters = components.parameters;
  return {
      Llama(config, random_weights(config, at::kDouble), dtype, std::move(components)), std::move(parameters), {}, {}};
}

std::map<std::string, at::Tensor> gradients_of(const AdaptedModel& adapted, const at::Tensor& tokens,
                                               Checkpointing checkpointing) {
  for (const Parameter& p : adapted.parameters) p.value.mutable_grad().reset();
  ForwardInput in;
  in.tokens = tokens;
  in.training = Training{checkpointing, 11};
  loss_sum(adapted.model, adapted.model.forward(in).last, tokens, in.training).backward();
  std::map<std::string, at::Tensor> all;
  for (const Parameter& p : adapted.parameters) {
    if (p.value.grad().defined()) all[p.name] = p.value.grad().clone();
  }
  return all;
}

ModelConfig windowed(std::vector<std::int64_t> windows, std::int64_t kv_heads = 2) {
  ModelConfig config = random_config(false);
  config.kv_heads = kv_heads;
  for (const std::int64_t window : windows) config.layer_specs.push_back({true, window});
  return config;
}

// Norms over each head of q and k; the middle layer does not rotate and has a window.
ModelConfig of_newer_families() {
  ModelConfig config = windowed({0, 5, 0});
  config.layer_specs[1].rotates = false;
  config.qk_norm = true;
  return config;
}

at::Tensor random_tokens(std::int64_t rows, std::int64_t length) {
  at::manual_seed(7);
  return at::randint(61, {rows, length}, at::kLong);
}

}  // namespace

TEST_CASE("position encodings: the lab's logits, hidden states, states, loss and every gradient") {
  for (const std::string name : {"nope", "alibi", "alibi-6-heads", "tape-full", "tape-per-head", "rope"}) {
    const std::filesystem::path folder = lab(name);
    if (folder.empty()) continue;
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
      for (const Checkpointing mode : {Checkpointing::off, Checkpointing::full, Checkpointing::selective}) {
        INFO(name << " in " << dtype << ", checkpointing " << static_cast<int>(mode));
        equals_lab(folder, dtype, mode);
      }
    }
  }
}

TEST_CASE("position encodings: five steps of AdamW have the lab's losses") {
  for (const std::string name : {"nope", "alibi", "alibi-6-heads", "tape-full", "tape-per-head", "rope"}) {
    const std::filesystem::path folder = lab(name);
    if (folder.empty()) continue;
    INFO(name);
    const Checkpoint checkpoint = open_checkpoint(folder);
    const auto expected = load_tensors(folder / "expected.safetensors");
    const AdaptedModel adapted = open_adapted(checkpoint, map_weights(checkpoint), at::kFloat, /*train_all=*/true);
    AdamW optimizer(adapted.parameters, {.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0});
    ForwardInput in;
    in.tokens = expected.at("input_ids");
    in.training = Training{};
    for (int step = 0; step <= 5; ++step) {
      for (const Parameter& p : adapted.parameters) p.value.mutable_grad().reset();
      const at::Tensor loss = golden_loss(adapted.model, adapted.model.forward(in), expected.at("labels"));
      INFO("step " << step);
      CHECK(std::abs(loss.item<double>() - expected.at("losses")[step].item<double>()) <= (step == 0 ? 3e-6 : 2e-5));
      loss.backward();
      optimizer.step(0.01);
    }
  }
}

TEST_CASE("ALiBi: the bias is the lab's, for a head count that is no power of two too") {
  for (const std::string name : {"alibi", "alibi-6-heads"}) {
    const auto expected = load_tensors(lab(name) / "expected.safetensors");
    const Checkpoint checkpoint = open_checkpoint(lab(name));
    const AdaptedModel adapted = open_adapted(checkpoint, map_weights(checkpoint), at::kDouble);
    const at::Tensor golden = expected.at("bias.0");  // [H, N, N], zero above the diagonal
    const at::Tensor bias = adapted.model.components().positions->score_bias(
        {adapted.model.config(), 0, golden.size(1), at::TensorOptions().dtype(at::kDouble)});
    for (std::int64_t i = 0; i < golden.size(1); ++i) {
      for (std::int64_t j = 0; j <= i; ++j) {
        CHECK(largest_difference(bias.select(1, i - j), golden.select(1, i).select(1, j)) <= 1e-12);
      }
    }
  }
}

TEST_CASE("a bias that learns has the gradient of finite differences, also within a recomputed layer") {
  const AdaptedModel adapted = with_learned_bias(at::kDouble);
  const at::Tensor tokens = random_tokens(2, 16);
  const auto exact = gradients_of(adapted, tokens, Checkpointing::off);
  REQUIRE(exact.size() == adapted.parameters.size());
  const auto loss = [&] {
    ForwardInput in;
    in.tokens = tokens;
    in.training = Training{};
    return loss_sum(adapted.model, adapted.model.forward(in).last, tokens).item<double>();
  };
  for (const Parameter& p : adapted.parameters) {
    INFO(p.name);
    const c10::NoGradGuard probing;
    const at::Tensor direction = at::randn(p.value.sizes(), at::kDouble);
    p.value.add_(direction, 1e-6);
    const double above = loss();
    p.value.add_(direction, -2e-6);
    const double below = loss();
    p.value.add_(direction, 1e-6);
    CHECK((above - below) / 2e-6 == Approx((exact.at(p.name) * direction).sum().item<double>()).epsilon(1e-5));
    CHECK(exact.at(p.name).narrow(1, 16, longest - 16).abs().max().item<double>() == 0);  // distances that do not occur
  }
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    const AdaptedModel other = with_learned_bias(dtype);
    for (const Checkpointing mode : {Checkpointing::off, Checkpointing::full, Checkpointing::selective}) {
      const auto found = gradients_of(other, tokens, mode);
      for (const auto& [name, gradient] : exact) {
        INFO(name << " in " << dtype);
        REQUIRE(found.contains(name));
        CHECK(relative_difference(found.at(name), gradient) < (dtype == at::kDouble  ? 1e-12
                                                               : dtype == at::kFloat ? 3e-5
                                                                                     : 0.1));
      }
    }
  }
}

TEST_CASE("windows: a layer's token depends on just so many tokens, in training, evaluation and decoding") {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    const ModelConfig config = windowed({4, 1, 3});
    const Llama model(config, random_weights(config, at::kFloat), dtype);
    const c10::NoGradGuard evaluation;
    const at::Tensor tokens = random_tokens(1, 20);
    const std::int64_t reach = 3 + 0 + 2;  // tokens back over all layers
    for (const bool training : {false, true}) {
      const auto hidden = [&](const at::Tensor& of) {
        ForwardInput in;
        in.tokens = of;
        if (training) in.training = Training{};
        return model.forward(in).last[0];
      };
      const at::Tensor before = hidden(tokens);
      for (const std::int64_t changed : {0, 7, 12}) {
        at::Tensor other = tokens.clone();
        other[0][changed] = (tokens[0][changed].item<std::int64_t>() + 1) % 61;
        const at::Tensor after = hidden(other);
        for (std::int64_t i = 0; i < 20; ++i) {
          INFO(dtype << ": token " << changed << " changed, " << i);
          const bool sees = i >= changed && i <= changed + reach;
          CHECK(at::equal(after[i], before[i]) == !sees);
        }
      }
    }
  }
}

TEST_CASE("windows: those as long as the text change no bit, and attention.window=none turns them off") {
  const c10::NoGradGuard evaluation;
  const at::Tensor tokens = random_tokens(2, 24);
  const auto logits = [&](const ModelConfig& config, const std::vector<std::string>& words) {
    const AdaptedModel adapted =
        adapt(config, random_weights(config, at::kFloat), parse_method("none", words), at::kFloat);
    ForwardInput in;
    in.tokens = tokens;
    return adapted.model.logits(adapted.model.forward(in).last);
  };
  const at::Tensor full = logits(random_config(false), {});
  CHECK(at::equal(logits(windowed({24, 24, 30}), {}), full));
  CHECK_FALSE(at::equal(logits(windowed({24, 23, 30}), {}), full));
  CHECK(at::equal(logits(windowed({3, 5, 0}), {"attention.window=none"}), full));
}

TEST_CASE("a layer without rotation does not see where its tokens are, and TAPE's state flows through it") {
  const c10::NoGradGuard evaluation;
  const at::Tensor tokens = random_tokens(1, 12);
  const auto hidden = [&](const ModelConfig& config, const std::string& encoding, std::int64_t from, double stretch) {
    const AdaptedModel adapted =
        adapt(config, random_weights(config, at::kDouble),
              parse_method("none", std::vector{"positions.encoding=" + encoding}), at::kDouble);
    at::manual_seed(5);
    for (const Parameter& p : adapted.parameters) p.value.add_(at::randn(p.value.sizes(), at::kDouble), 0.3);
    ForwardInput in;
    in.tokens = tokens;
    in.positions = (at::arange(12, at::kLong) * static_cast<std::int64_t>(stretch) + from).unsqueeze(0);
    in.planned_length = 64;
    return adapted.model.forward(in).last;
  };
  ModelConfig none = windowed({0, 0, 0}), middle = none;
  for (LayerSpec& layer : none.layer_specs) layer.rotates = false;
  middle.layer_specs[1].rotates = false;
  CHECK(at::equal(hidden(none, "rope", 0, 1), hidden(none, "rope", 0, 3)));
  CHECK(largest_difference(hidden(middle, "rope", 0, 1), hidden(middle, "rope", 0, 3)) > 1e-3);
  CHECK(largest_difference(hidden(middle, "rope", 0, 1), hidden(windowed({}), "rope", 0, 1)) > 1e-3);
  // Only distances count for TAPE, also behind the layer that does not rotate, and its state still changes there.
  CHECK(largest_difference(hidden(middle, "tape", 0, 1), hidden(middle, "tape", 17, 1)) < 1e-9);
  CHECK(largest_difference(hidden(middle, "tape", 0, 1), hidden(middle, "tape", 0, 3)) > 1e-3);
  CHECK(largest_difference(hidden(middle, "tape", 0, 1), hidden(middle, "rope", 0, 1)) > 1e-3);
}

TEST_CASE("two ranks that share a sequence compute what one does: windows, biases, groups, few key heads, families") {
  struct Case {
    std::string name;
    std::function<AdaptedModel()> make;
  };
  const auto adapted = [](ModelConfig config, const std::string& method, std::vector<std::string> words,
                          at::ScalarType dtype) {
    AdaptedModel made = adapt(config, random_weights(config, at::kDouble), parse_method(method, words), dtype, 3);
    const c10::NoGradGuard moving;
    at::manual_seed(5);
    for (const Parameter& p : made.parameters) {
      p.value.add_(at::randn(p.value.sizes(), at::kDouble).to(p.value.scalar_type()), 0.1);
    }
    return made;
  };
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    const Case cases[] = {
        {"window", [&] { return adapted(windowed({5, 0, 3}), "full", {}, dtype); }},
        {"window, one key head", [&] { return adapted(windowed({5, 0, 3}, 1), "full", {}, dtype); }},
        {"alibi", [&] { return adapted(random_config(false), "full", {"positions.encoding=alibi"}, dtype); }},
        {"tape in windows", [&] { return adapted(windowed({6, 0, 4}), "full", {"positions.encoding=tape"}, dtype); }},
        {"groups in windows", [&] { return adapted(windowed({6, 0, 4}), "longlora", {}, dtype); }},
        {"q and k norms, a layer without rotation", [&] { return adapted(of_newer_families(), "full", {}, dtype); }},
        {"tape there", [&] { return adapted(of_newer_families(), "full", {"positions.encoding=tape"}, dtype); }},
        {"learned bias", [&] { return with_learned_bias(dtype); }}};
    for (const Case& c : cases) {
      for (const Checkpointing mode : {Checkpointing::off, Checkpointing::full, Checkpointing::selective}) {
        INFO(c.name << " in " << dtype << ", checkpointing " << static_cast<int>(mode));
        const at::Tensor tokens = random_tokens(2, 16);
        const auto expected = gradients_of(c.make(), tokens, mode);
        std::mutex adding;
        std::map<std::string, at::Tensor> sums;
        Ranks ranks(2);
        std::vector<AdaptedModel> models;  // made one after the other: they draw from one generator
        for (int i = 0; i < 2; ++i) models.push_back(c.make());
        ranks.each([&](Rank& rank) {
          rank.adapted = std::make_unique<AdaptedModel>(models[static_cast<std::size_t>(rank.world->rank())]);
          Parallel parallel;
          ulysses(parallel, rank.world->group("sequence"), rank.adapted->model.config());
          rank.adapted->model.share(rank.adapted->model.weights(), parallel);
          const at::Tensor own = tokens.narrow(1, 8 * parallel.sequence_rank, 8).contiguous();
          const auto found = gradients_of(*rank.adapted, own, mode);
          const std::lock_guard lock(adding);
          for (const auto& [name, gradient] : found) {
            sums[name] = sums.contains(name) ? sums[name] + gradient : gradient;
          }
        });
        CHECK(sums.size() == expected.size());
        for (const auto& [name, gradient] : expected) {
          INFO(name);
          REQUIRE(sums.contains(name));
          CHECK(relative_difference(sums.at(name), gradient) < (dtype == at::kFloat ? 2e-5 : 1e-11));
        }
      }
    }
  }
}

TEST_CASE("a model with other positions than RoPE trains, resumes, merges as no plain Llama, and is read back") {
  for (const std::string encoding : {"nope", "alibi"}) {
    INFO(encoding);
    const TrainingSetup setup("{method: full}");
    const std::string run_folder = setup.folder().string(), merged = setup.folder("merged").string(),
                      converted = setup.folder("converted").string(), choice = "positions.encoding=" + encoding;
    REQUIRE(setup.train({choice}).exit == 0);
    // Cut off after step 6 and finished: the same result.
    REQUIRE(killed_at("step:8",
                      {"train", setup.recipe(), "--threads", "1", choice, "run=" + setup.folder("cut").string()}));
    REQUIRE(setup.train({choice, "run=" + setup.folder("cut").string()}).exit == 0);
    CHECK(read_file(setup.folder() / "adapter/adapter_model.safetensors") ==
          read_file(setup.folder("cut") / "adapter/adapter_model.safetensors"));

    REQUIRE(run({"merge", run_folder, "--out", merged}).exit == 0);
    REQUIRE(run({"convert", merged, "--out", converted}).exit == 0);
    const auto logits = [&](const std::string& folder) {
      const std::string out = setup.folder("logits.safetensors").string();
      REQUIRE(run({"logits", folder, "--tokens", "1,5,9,20,33", "--out", out, "--force"}).err.empty());
      return load_tensors(out).at("logits");
    };
    const at::Tensor expected = logits(run_folder);
    CHECK(largest_difference(expected, logits(setup.model.path())) > 1e-3);
    for (const std::string& folder : {merged, converted}) {
      CHECK(at::equal(logits(folder), expected));
      const Json config = from_text(read_file(std::filesystem::path(folder) / "config.json"));
      CHECK(config["architectures"] == Json::array({"TapetuneForCausalLM"}));
      CHECK(config["model_type"] != "llama");
      CHECK(config["position"]["type"] == encoding);
    }
    const std::string gguf = setup.folder("model.gguf").string();
    for (const std::vector<std::string>& words :
         {std::vector<std::string>{"merge", run_folder, "--gguf", "f32", "--out", gguf},
          {"export", merged, "--gguf", "f32", "--out", gguf}}) {
      refused_in_a_line(run(words), Contains("llama.cpp does not support"));
      CHECK_FALSE(std::filesystem::exists(gguf));
    }
  }
}

}  // namespace positions_test
