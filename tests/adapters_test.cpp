// Every method against the same demands: exact gradients, checkpointing that changes nothing, saving, batches, bf16.
#include "adapters/build_model.h"

#include <c10/core/InferenceMode.h>

#include "adapters/peft.h"
#include "catch.h"
#include "model/generate.h"
#include "model/loss.h"
#include "support.h"

namespace adapters_test {

using namespace tapetune;
using namespace tapetune::test;

namespace {

struct Case {
  std::string name, method;
  std::vector<std::string> words;
  std::vector<std::int64_t> windows = {};  // of the model's layers; empty: none
  bool qk_norm = false;
  std::int64_t unrotated = -1;  // this layer does not rotate; -1: all do
  bool has_tape() const {
    return method == "tape" || std::ranges::find(words, "positions.encoding=tape") != words.end();
  }
};

const std::vector<Case>& cases() {
  static const std::vector<Case> all{
      {"lora", "lora", {"rank=3"}},
      {"lora everywhere", "lora", {"rank=2", "targets=q,k,v,o,gate,up,down,lm_head"}},
      {"rslora", "lora", {"rank=4", "rslora=true"}},
      {"lora in some layers",
       "lora",
       {"rank=2", "layers_to_transform=1", "exclude_modules=k_proj,layers.1.self_attn.v_proj"}},
      {"dora", "lora", {"rank=2", "dora=true", "targets=q,o,up,down"}},
      {"lora and more", "lora", {"rank=2", "train_also=embeddings,norms,lm_head"}},
      {"longlora", "longlora", {"rank=2", "train_also=embeddings,norms"}},
      {"theta-scaling", "theta-scaling", {"rank=2", "scaling=linear", "factor=2"}},
      {"tape", "tape", {}},
      {"tape per head", "tape", {"mix=per-head", "train_also=norms"}},
      {"tape and lora", "tape", {"rank=2", "scaling=yarn", "factor=4"}},
      {"tape, dynamic", "tape", {"scaling=dynamic", "factor=2", "width=2", "random_offset=true"}},
      {"tape, not equivariant", "tape", {"equivariant=false"}},
      {"dora on the head", "lora", {"rank=2", "dora=true", "targets=v,lm_head", "train_also=norms"}},
      {"ia3 from outside", "none", {"adapter.type=ia3"}},
      {"ia3 everywhere, and norms",
       "none",
       {"adapter.type=ia3", "adapter.targets=q,k,v,o,gate,up,down", "positions.encoding=alibi", "train_also=norms"}},
      {"full", "full", {}},
      {"full and tape", "full", {"positions.encoding=tape"}},
      {"full and lora", "full", {"rank=2"}},
      {"nope, everything trains", "none", {"positions.encoding=nope", "train_also=all"}},
      {"alibi and lora", "lora", {"rank=2", "positions.encoding=alibi", "train_also=norms"}},
      {"lora in windows", "lora", {"rank=2"}, {5, 0, 3}},
      {"longlora in windows", "longlora", {"rank=2"}, {5, 0, 3}},
      {"tape in windows", "tape", {"train_also=norms"}, {5, 3, 0}},
      {"alibi in windows, everything trains", "full", {"positions.encoding=alibi"}, {5, 4, 3}},
      {"q and k norms, everything trains", "full", {}, {}, true},
      {"lora and norms, q and k norms", "lora", {"rank=2", "train_also=norms"}, {}, true},
      {"tape, q and k norms", "tape", {"train_also=norms"}, {}, true},
      {"a layer without rotation and with a window, everything trains", "full", {}, {0, 5, 0}, false, 1},
      {"lora, a layer without rotation", "lora", {"rank=2"}, {0, 0, 0}, false, 1},
      {"tape through a layer without rotation", "tape", {}, {0, 0, 0}, false, 1}};
  return all;
}

ModelConfig config_of(const Case& which, bool tied) {
  ModelConfig config = random_config(tied);
  config.qk_norm = which.qk_norm;
  for (const std::int64_t window : which.windows) config.layer_specs.push_back({true, window});
  if (which.unrotated >= 0) config.layer_specs.at(static_cast<std::size_t>(which.unrotated)).rotates = false;
  return config;
}

// A method away from its start, where nothing is zero and every gradient counts.
AdaptedModel moved(const Case& which, at::ScalarType dtype, bool tied = false) {
  const ModelConfig config = config_of(which, tied);
  AdaptedModel adapted =
      adapt(config, random_weights(config, at::kDouble), parse_method(which.method, which.words), dtype, 3);
  const c10::NoGradGuard moving;
  at::manual_seed(5);
  for (const Parameter& p : adapted.parameters) {
    p.value.add_(at::randn(p.value.sizes(), at::kDouble).to(p.value.scalar_type()), 0.1);
  }
  return adapted;
}

at::Tensor tokens(std::int64_t rows = 1) {
  at::manual_seed(7);
  return at::randint(61, {rows, 16}, at::kLong);
}

at::Tensor loss_of(const AdaptedModel& adapted, const at::Tensor& batch, Checkpointing checkpointing) {
  ForwardInput in;
  in.tokens = batch;
  in.training = Training{checkpointing, 11};
  const at::Tensor hidden = adapted.model.forward(in).last;  // [B, N, hidden]
  const at::Tensor before = hidden.narrow(1, 0, batch.size(1) - 1).flatten(0, 1),
                   next = batch.narrow(1, 1, batch.size(1) - 1).flatten();
  return loss_sum(adapted.model, before, next, in.training) / static_cast<double>(next.size(0));
}

std::map<std::string, at::Tensor> gradients(const AdaptedModel& adapted, Checkpointing checkpointing,
                                            const at::Tensor& batch) {
  for (const Parameter& p : adapted.parameters) p.value.mutable_grad().reset();
  loss_of(adapted, batch, checkpointing).backward();
  std::map<std::string, at::Tensor> all;
  for (const Parameter& p : adapted.parameters) {
    if (p.value.grad().defined()) all[p.name] = p.value.grad().clone();
  }
  return all;
}

// The cases, and those that train the ends of the model with tied embeddings as well.
std::vector<std::pair<Case, bool>> tied_too() {
  std::vector<std::pair<Case, bool>> all;
  for (const Case& which : cases()) all.emplace_back(which, false);
  all.emplace_back(Case{"full, tied", "full", {}}, true);
  all.emplace_back(Case{"lora and embeddings, tied", "lora", {"rank=2", "train_also=embeddings"}}, true);
  all.emplace_back(Case{"lora, untied", "lora", {"rank=2", "train_also=embeddings,lm_head", "untie=true"}}, true);
  return all;
}

bool feeds_nothing(const std::string& name) {
  return name.starts_with("model.layers.2.") &&
         (name.find(".pe.") != std::string::npos || name.find("post_attention_linear") != std::string::npos);
}

}  // namespace

TEST_CASE("methods: gradients equal finite differences in float64") {
  for (const auto& [which, tied] : tied_too()) {
    const AdaptedModel adapted = moved(which, at::kDouble, tied);
    const at::Tensor batch = tokens(2);
    const auto exact = gradients(adapted, Checkpointing::off, batch);
    for (const Parameter& p : adapted.parameters) {
      INFO(which.name << ": " << p.name);
      if (feeds_nothing(p.name)) {
        CHECK_FALSE(exact.contains(p.name));
        continue;
      }
      REQUIRE(exact.contains(p.name));
      // DoRA's norm counts as a constant in its gradients, as in the paper; they are checked against PEFT instead.
      if (which.name.starts_with("dora") && !p.name.ends_with("magnitude_vector")) continue;
      const c10::NoGradGuard probing;
      const at::Tensor direction = at::randn(p.value.sizes(), p.value.options().requires_grad(false));
      const double step = 1e-6;
      p.value.add_(direction, step);
      const double above = loss_of(adapted, batch, Checkpointing::off).item<double>();
      p.value.add_(direction, -2 * step);
      const double below = loss_of(adapted, batch, Checkpointing::off).item<double>();
      p.value.add_(direction, step);
      const double measured = (above - below) / (2 * step);
      const double said = (exact.at(p.name) * direction).sum().item<double>();
      const double size = exact.at(p.name).norm().item<double>();
      CHECK(size > 1e-9);
      CHECK(std::abs(measured - said) <= 1e-6 * std::max(size, 1e-3));
    }
  }
}

TEST_CASE("methods: checkpointing off, full and selective give the same loss and gradients") {
  for (const Case& which : cases()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
      const AdaptedModel adapted = moved(which, dtype);
      const auto off = gradients(adapted, Checkpointing::off, tokens(2));
      const std::size_t unused = !which.has_tape() ? 0 : which.name == "tape, not equivariant" ? 8 : 4;
      CHECK(off.size() + unused == adapted.parameters.size());
      for (const Checkpointing mode : {Checkpointing::full, Checkpointing::selective}) {
        const auto again = gradients(adapted, mode, tokens(2));
        CHECK(again.size() == off.size());
        for (const auto& [name, gradient] : off) {
          INFO(which.name << " in " << dtype << ": " << name);
          REQUIRE(again.contains(name));
          CHECK(relative_difference(again.at(name), gradient) < (dtype == at::kFloat ? 1e-5 : 1e-12));
        }
      }
    }
  }
}

TEST_CASE("methods: f32 gradients of the fused kernels are those of float64") {
  for (const Case& which : cases()) {
    const auto exact = gradients(moved(which, at::kDouble), Checkpointing::off, tokens(2));
    const auto fused = gradients(moved(which, at::kFloat), Checkpointing::off, tokens(2));
    for (const auto& [name, gradient] : exact) {
      INFO(which.name << ": " << name);
      CHECK(relative_difference(fused.at(name), gradient) < 2e-5);
    }
  }
}

TEST_CASE("methods: an adapter that is saved and loaded gives the same bits") {
  for (const Case& which : cases()) {
    for (const bool tied : {false, true}) {
      INFO(which.name << (tied ? ", tied" : ""));
      const TempFolder folder;
      const AdaptedModel before = moved(which, at::kFloat, tied);
      save_adapter(before, folder / "adapter", "base", false);
      const ModelConfig config = config_of(which, tied);
      const AdaptedModel after =
          load_adapter(config, random_weights(config, at::kDouble), folder / "adapter", at::kFloat);
      REQUIRE(after.parameters.size() == before.parameters.size());
      CHECK(method_json(after.options) == method_json(before.options));
      for (std::size_t i = 0; i < before.parameters.size(); ++i) {
        CHECK(after.parameters[i].name == before.parameters[i].name);
        CHECK(at::equal(after.parameters[i].value, before.parameters[i].value));
      }
      const c10::NoGradGuard evaluation;
      ForwardInput in;
      in.tokens = tokens();
      CHECK(at::equal(after.model.logits(after.model.forward(in).last),
                      before.model.logits(before.model.forward(in).last)));
    }
  }
}

TEST_CASE("methods: a row of a batch gives what it gives alone, in training and in evaluation") {
  for (const Case& which : cases()) {
    const AdaptedModel adapted = moved(which, at::kFloat);
    const c10::NoGradGuard evaluation;
    for (const bool training : {false, true}) {
      INFO(which.name << (training ? ", training" : ""));
      ForwardInput in;
      in.tokens = tokens(3);
      if (training) in.training = Training{};
      const at::Tensor together = adapted.model.logits(adapted.model.forward(in).last);
      in.tokens = in.tokens.narrow(0, 1, 1);
      CHECK(relative_difference(together.narrow(0, 1, 1), adapted.model.logits(adapted.model.forward(in).last)) < 1e-5);
    }
  }
}

TEST_CASE("methods: bf16 stays close to f32, forward and backward") {
  for (const Case& which : cases()) {
    INFO(which.name);
    const AdaptedModel narrow = moved(which, at::kBFloat16), wide = moved(which, at::kFloat);
    const auto rough = gradients(narrow, Checkpointing::full, tokens(2)),
               exact = gradients(wide, Checkpointing::full, tokens(2));
    double dot = 0, a = 0, b = 0;
    for (const auto& [name, gradient] : exact) {
      CHECK(rough.at(name).scalar_type() == at::kFloat);  // what trains stays f32
      const at::Tensor other = rough.at(name);
      dot += (gradient * other).sum().item<double>();
      a += gradient.square().sum().item<double>();
      b += other.square().sum().item<double>();
    }
    CHECK(dot / std::sqrt(a * b) > 0.99);
    const c10::NoGradGuard evaluation;
    CHECK(std::abs(loss_of(narrow, tokens(2), Checkpointing::off).item<double>() -
                   loss_of(wide, tokens(2), Checkpointing::off).item<double>()) < 0.05);
  }
}

TEST_CASE("methods: cached decoding equals uncached") {
  for (const Case& which : cases()) {
    INFO(which.name);
    const c10::NoGradGuard evaluation;
    const AdaptedModel adapted = moved(which, at::kDouble);
    const at::Tensor all = tokens();
    ForwardInput in;
    in.tokens = all;
    in.planned_length = 16;
    const at::Tensor whole = adapted.model.logits(adapted.model.forward(in).last)[0];
    SequenceCache cache = adapted.model.make_cache(16);
    std::vector<at::Tensor> parts;
    for (const auto& [begin, count] :
         {std::pair<std::int64_t, std::int64_t>{0, 9}, {9, 1}, {10, 4}, {14, 1}, {15, 1}}) {
      in.tokens = all.narrow(1, begin, count);
      in.caches = {&cache};
      parts.push_back(adapted.model.logits(adapted.model.forward(in).last)[0]);
    }
    CHECK(largest_difference(at::cat(parts), whole) < 1e-10);
    // And in f32, where a single token takes a kernel of its own.
    const AdaptedModel fused = moved(which, at::kFloat);
    GenerateOptions options;
    options.max_new_tokens = 6;
    options.context = 64;
    const auto cached = generate(fused.model, {{5, 9, 2, 30}}, options);
    options.use_cache = false;
    CHECK(cached[0].tokens == generate(fused.model, {{5, 9, 2, 30}}, options)[0].tokens);
  }
}

TEST_CASE("methods: at the start the adapted model is the base model") {
  const c10::NoGradGuard evaluation;
  const ModelConfig config = random_config(false);
  const LlamaWeights weights = random_weights(config, at::kFloat);
  ForwardInput in;
  in.tokens = tokens(2);
  const Llama base(config, weights, at::kFloat);
  const at::Tensor expected = base.logits(base.forward(in).last);
  const auto start = [&](const std::string& method, const std::vector<std::string>& words) {
    const AdaptedModel adapted = adapt(config, weights, parse_method(method, words), at::kFloat);
    return adapted.model.logits(adapted.model.forward(in).last);
  };
  CHECK(at::equal(start("none", {}), expected));
  CHECK(at::equal(start("tape", {}), expected));  // the same attention kernel runs, so bit for bit
  CHECK(at::equal(start("tape", {"mix=per-head"}), expected));
  CHECK(largest_difference(start("lora", {}), expected) < 1e-6);
  CHECK(largest_difference(start("lora", {"dora=true"}), expected) < 1e-5);
  CHECK(largest_difference(start("longlora", {}), expected) < 1e-6);
  CHECK(at::equal(start("full", {}), expected));
  CHECK(at::equal(start("none", {"adapter.type=ia3"}), expected));
  CHECK(largest_difference(start("theta-scaling", {}), expected) > 1e-4);  // other angles are another model
}

TEST_CASE("dropout draws differently with every seed, and the same again for a recomputed layer") {
  for (const std::string dora : {"dora=false", "dora=true"}) {
    const AdaptedModel adapted =
        moved({"", "lora", {"rank=2", "dropout=0.4", "targets=q,k,v,o,gate,up,down,lm_head", dora}}, at::kDouble);
    const auto off = gradients(adapted, Checkpointing::off, tokens()),
               full = gradients(adapted, Checkpointing::full, tokens());
    for (const auto& [name, gradient] : off) CHECK(relative_difference(full.at(name), gradient) < 1e-12);
    const c10::NoGradGuard evaluation;
    const auto logits = [&](std::optional<Training> training) {
      ForwardInput in;
      in.tokens = tokens();
      in.training = training;
      return adapted.model.logits(adapted.model.forward(in).last);
    };
    const auto loss = [&](std::uint64_t seed) {
      at::Tensor hidden = at::ones({5, 32}, at::kDouble), targets = at::arange(5);  // only the head can draw here
      return loss_sum(adapted.model, hidden, targets, Training{Checkpointing::off, seed}).item<double>();
    };
    CHECK(loss(1) == loss(1));
    CHECK(std::abs(loss(1) - loss(2)) > 1e-6);
    CHECK(largest_difference(logits(Training{Checkpointing::off, 1}), logits(Training{Checkpointing::off, 2})) > 1e-3);
    CHECK(at::equal(logits(Training{Checkpointing::off, 1}), logits(Training{Checkpointing::off, 1})));
    CHECK(at::equal(logits(std::nullopt), logits(std::nullopt)));
  }
}

TEST_CASE("the training loss comes in blocks, and its gradients are those of all logits at once") {
  struct Size {
    at::ScalarType dtype;
    std::int64_t vocab, width, tokens;
  };
  // Three blocks, the last one shorter; some targets do not count. In f32 a vocabulary that occurs: sums over millions
  // of logits lose more digits than the tolerance allows, in ATen too.
  for (const auto& [dtype, vocab, width, count] :
       {Size{at::kFloat, 128'256, 64, 300}, Size{at::kDouble, 3'000'000, 2, 13}}) {
    for (const bool lora : {false, true}) {
      ModelConfig config;
      config.vocab_size = vocab;
      config.hidden_size = width;
      at::manual_seed(6);
      LlamaWeights weights;
      weights.embedding = weights.head.weight = at::randn({vocab, width}, dtype);
      const std::vector<std::string> words{lora ? "targets=lm_head" : "train_also=lm_head", "rank=1"};
      const AdaptedModel adapted = adapt(config, weights, parse_method("lora", words), dtype);
      const at::Tensor hidden = at::randn({count, width}, dtype).requires_grad_(true);
      at::Tensor targets = at::arange(count);
      targets[2] = -1;
      targets[5] = vocab - 1;
      targets[7] = -100;
      loss_sum(adapted.model, hidden, targets).backward();
      // The same model and input in f64.
      weights.embedding = weights.head.weight = weights.head.weight.to(at::kDouble);
      const AdaptedModel exact = adapt(config, weights, parse_method("lora", words), at::kDouble);
      const at::Tensor alone = hidden.detach().to(at::kDouble).requires_grad_(true);
      std::vector<at::Tensor> wanted{alone};
      for (std::size_t i = 0; i < exact.parameters.size(); ++i) {
        REQUIRE(exact.parameters[i].name == adapted.parameters[i].name);
        const c10::NoGradGuard copying;
        at::Tensor value = exact.parameters[i].value;
        wanted.push_back(value.copy_(adapted.parameters[i].value));
      }
      const at::Tensor all = at::log_softmax(exact.model.logits(alone), 1);
      const at::Tensor expected = at::nll_loss(all, targets.masked_fill(targets < 0, -100), {}, at::Reduction::Sum);
      const auto grads = torch::autograd::grad({expected}, wanted);
      const double tolerance = dtype == at::kFloat ? 1e-4 : 1e-10;
      CHECK(relative_difference(hidden.grad(), grads[0]) < tolerance);
      for (std::size_t i = 0; i < adapted.parameters.size(); ++i) {
        INFO(adapted.parameters[i].name << " in " << dtype);
        CHECK(largest_difference(adapted.parameters[i].value.grad(), grads[i + 1]) <
              tolerance * std::max(1.0, grads[i + 1].abs().max().item<double>()));
      }
      const at::Tensor none = at::full({count}, -100, at::kLong);
      const at::Tensor silent = hidden.detach().requires_grad_(true);
      const at::Tensor nothing = loss_sum(adapted.model, silent, none);
      nothing.backward();
      CHECK(nothing.item<double>() == 0);
      CHECK(silent.grad().abs().max().item<double>() == 0);
      CHECK_THROWS_WITH(loss_sum(adapted.model, hidden, at::full({count}, vocab, at::kLong)), Contains("out of range"));
    }
  }
}

TEST_CASE("methods: padded rows, alone and with caches, give what they give alone") {
  const c10::NoGradGuard evaluation;
  for (const Case& which : cases()) {
    INFO(which.name);
    const AdaptedModel adapted = moved(which, at::kFloat);
    const auto logits = [&](const ForwardInput& in) { return adapted.model.logits(adapted.model.forward(in).last); };
    const at::Tensor all = tokens(2);
    ForwardInput in;
    in.planned_length = 16;
    in.tokens = at::stack({all[0].narrow(0, 0, 9), at::constant_pad_nd(all[1].narrow(0, 0, 5), {4, 0}, 7)});
    in.spans = {{0, 9}, {4, 9}};
    const auto alone = [&](std::int64_t row, std::int64_t count) {
      ForwardInput one;
      one.planned_length = 16;
      one.tokens = all.narrow(0, row, 1).narrow(1, 0, count);
      return logits(one)[0];
    };
    const at::Tensor padded = logits(in);
    CHECK(relative_difference(padded[0], alone(0, 9)) < 1e-5);
    CHECK(relative_difference(padded[1].narrow(0, 4, 5), alone(1, 5)) < 1e-5);
    SequenceCache first = adapted.model.make_cache(16), second = adapted.model.make_cache(16);
    in.caches = {&first, &second};
    adapted.model.forward(in);
    ForwardInput next;
    next.planned_length = 16;
    next.tokens = at::stack({all[0].narrow(0, 9, 1), all[1].narrow(0, 5, 1)});
    next.caches = in.caches;
    const at::Tensor after = logits(next);
    CHECK(relative_difference(after[0][0], alone(0, 10)[9]) < 2e-5);
    CHECK(relative_difference(after[1][0], alone(1, 6)[5]) < 2e-5);
  }
}

TEST_CASE("tied embeddings train once and stay tied, or are untied on request") {
  const ModelConfig config = random_config(true);
  const LlamaWeights weights = random_weights(config, at::kDouble);
  const auto with = [&](const std::vector<std::string>& words) {
    return adapt(config, weights, parse_method("lora", words), at::kDouble);
  };
  const AdaptedModel tied = with({"train_also=embeddings"});
  CHECK(tied.notes.size() == 1);
  CHECK(tied.model.weights().head.weight.is_same(tied.model.weights().embedding));
  CHECK(tied.model.config().tied_embeddings);
  const AdaptedModel untied = with({"train_also=embeddings,lm_head", "untie=true"});
  CHECK_FALSE(untied.model.config().tied_embeddings);
  CHECK(untied.parameters.size() == tied.parameters.size() + 1);
  // Its gradient is the sum of those of both uses.
  const auto one = gradients(tied, Checkpointing::off, tokens()), two = gradients(untied, Checkpointing::off, tokens());
  CHECK(largest_difference(one.at("model.embed_tokens.weight"),
                           two.at("model.embed_tokens.weight") + two.at("lm_head.weight")) < 1e-12);
}

TEST_CASE("trainable parameters are chosen by structure, and counted as the papers count them") {
  // Llama-2 7B by its config alone; the weights take no memory.
  ModelConfig config;
  config.vocab_size = 32000;
  config.hidden_size = 4096;
  config.intermediate_size = 11008;
  config.layers = 32;
  config.heads = config.kv_heads = 32;
  config.head_dim = 128;
  config.context = 4096;
  const auto empty = [](std::vector<std::int64_t> shape) { return at::zeros({1}).expand(shape); };
  LlamaWeights weights;
  weights.embedding = empty({32000, 4096});
  const Linear square{empty({4096, 4096}), {}}, wide{empty({11008, 4096}), {}}, back{empty({4096, 11008}), {}};
  for (int i = 0; i < 32; ++i) {
    weights.layers.push_back({empty({4096}), square, square, square, square, {}, {}, empty({4096}), wide, wide, back});
  }
  weights.norm = empty({4096});
  weights.head = {empty({32000, 4096}), {}};
  const auto count = [&](const std::string& method, const std::vector<std::string>& words, const std::string& part) {
    std::int64_t sum = 0;
    for (const Parameter& p : adapt(config, weights, parse_method(method, words), at::kFloat).parameters) {
      if (p.name.find(part) != std::string::npos) sum += p.value.numel();
    }
    return sum;
  };
  CHECK(count("lora", {}, "") == 8'388'608);
  CHECK(count("lora", {"train_also=norms"}, "norm") == 266'240);
  CHECK(count("tape", {}, ".pe.") == 17'039'360);
  CHECK(count("tape", {}, "post_attention_linear") == 32 * 1024);
}

TEST_CASE("frequencies that are scaled already are scaled further only where that means something") {
  ModelConfig config = random_config(false);
  config.rope.type = RopeType::linear;
  config.rope.factor = 4;
  const LlamaWeights weights = random_weights(config, at::kFloat);
  const std::vector<std::string> twice{"scaling=linear", "factor=2"};
  const ModelConfig longer = adapt(config, weights, parse_method("lora", twice), at::kFloat).model.config();
  CHECK(longer.rope.factor == 8);
  CHECK(longer.context == 2 * config.context);
  config.rope.type = RopeType::llama3;
  CHECK_THROWS_WITH(adapt(config, weights, parse_method("lora", twice), at::kFloat),
                    Contains("scaled already (llama3, factor 4)"));
}

TEST_CASE("names on disk go there and back") {
  CHECK(name_on_disk("model.norm.weight") == "base_model.model.model.norm.weight");
  CHECK(name_from_disk("base_model.model.model.norm.weight") == "model.norm.weight");
  CHECK(name_from_disk("model.norm.weight") == "model.norm.weight");
}

}  // namespace adapters_test
