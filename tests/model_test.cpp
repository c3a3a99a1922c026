#include <c10/core/InferenceMode.h>

#include "catch.h"
#include "core/json.h"
#include "model/llama.h"
#include "model/loss.h"
#include "support.h"

namespace model_test {

using namespace tapetune;
using namespace tapetune::test;

namespace {

struct Tiny {
  explicit Tiny(const std::string& variant = "default", at::ScalarType dtype = at::kFloat) {
    tiny_checkpoint(folder.path(), variant);
    checkpoint.emplace(Checkpoint::open(folder.path()));
    model.emplace(Llama::open(*checkpoint, dtype));
  }
  at::Tensor logits(const ForwardInput& in) const { return model->logits(model->forward(in).last); }
  TempFolder folder;
  std::optional<Checkpoint> checkpoint;
  std::optional<Llama> model;
};

ForwardInput input(const at::Tensor& tokens) {
  ForwardInput in;
  in.tokens = tokens;
  return in;
}

const std::map<std::string, at::Tensor>& golden() {
  static const auto numbers = [] {
    const c10::InferenceMode not_here(false);  // other tests put them into a graph
    return load_tensors(data("tiny-logits.safetensors"));
  }();
  return numbers;
}

at::Tensor golden_tokens(std::int64_t length) { return golden().at("tokens").narrow(0, 0, length).unsqueeze(0); }

}  // namespace

TEST_CASE("logits equal transformers' for every rotary variant, below and above the original context") {
  const c10::InferenceMode inference;
  const Json configs = from_text(read_file(data("tiny-configs.json")));
  for (const auto& [name, config] : configs.items()) {
    const Tiny tiny(name);
    for (const std::int64_t length : {40, 80}) {
      INFO(name << " at " << length);
      const at::Tensor& expected = golden().at(fmt::format("{}.{}", name, length));
      CHECK(expected.std().item<double>() > 0.5);  // or the tolerance would mean little
      CHECK(largest_difference(tiny.logits(input(golden_tokens(length)))[0], expected) < 1e-4);
    }
  }
}

TEST_CASE("hidden states equal transformers', layer by layer") {
  const c10::InferenceMode inference;
  const Tiny tiny;
  ForwardInput in = input(golden_tokens(40));
  in.all_hidden = true;
  const ForwardOutput out = tiny.model->forward(in);
  REQUIRE(out.hidden.size() == 3);
  for (std::size_t k = 0; k < 3; ++k) {
    INFO(k);
    // f32 on either side is 4e-7 of the largest entry away from f64.
    const at::Tensor& expected = golden().at(fmt::format("hidden.{}", k));
    CHECK(largest_difference(out.hidden[k][0], expected) < 2e-6 * expected.abs().max().item<double>());
  }
}

TEST_CASE("the fused kernels and ATen's parts give the same, and f64 is more exact than both") {
  const Tiny tiny, precise("default", at::kDouble);
  const at::Tensor exact = precise.logits(input(golden_tokens(80)));
  CHECK(exact.scalar_type() == at::kDouble);
  {
    const c10::InferenceMode inference;
    CHECK(largest_difference(tiny.logits(input(golden_tokens(80))), exact) < 1e-4);
  }
  // Weights that ask for a gradient take the path with a graph.
  LlamaWeights weights = map_weights(*tiny.checkpoint);
  weights.embedding = weights.embedding.clone().requires_grad_(true);
  const Llama trained(tiny.checkpoint->config(), weights, at::kFloat);
  const at::Tensor logits = trained.logits(trained.forward(input(golden_tokens(80))).last);
  CHECK(logits.requires_grad());
  CHECK(largest_difference(logits.detach(), exact) < 1e-4);
}

TEST_CASE("bf16 weights computed in f32 equal the rounded weights, and bf16 arithmetic stays near") {
  const c10::InferenceMode inference;
  const Tiny tiny;
  const auto rounded = [&](at::ScalarType stored, at::ScalarType dtype) {
    LlamaWeights weights = map_weights(*tiny.checkpoint);
    const auto round = [&](at::Tensor& t) { t = t.defined() ? t.to(at::kBFloat16).to(stored) : t; };
    for (LayerWeights& layer : weights.layers) {
      round(layer.input_norm);
      round(layer.post_attention_norm);
      for (Linear* linear : {&layer.q, &layer.k, &layer.v, &layer.o, &layer.gate, &layer.up, &layer.down}) {
        round(linear->weight);
        round(linear->bias);
      }
    }
    round(weights.embedding);
    round(weights.norm);
    round(weights.head.weight);
    const Llama model(tiny.checkpoint->config(), weights, dtype);
    return model.logits(model.forward(input(golden_tokens(40))).last);
  };
  const at::Tensor wide = rounded(at::kFloat, at::kFloat);
  CHECK(largest_difference(rounded(at::kBFloat16, at::kFloat), wide) < 1e-5);
  const at::Tensor narrow = rounded(at::kBFloat16, at::kBFloat16);
  CHECK(narrow.scalar_type() == at::kBFloat16);
  CHECK(largest_difference(narrow, wide) < 0.03 * wide.abs().max().item<double>());
}

TEST_CASE("a padded batch gives each row what it gives alone, padded left or right") {
  const c10::InferenceMode inference;
  const Tiny tiny;
  const at::Tensor tokens = golden().at("tokens");
  const at::Tensor a = tokens.narrow(0, 0, 12), b = tokens.narrow(0, 20, 7), c = tokens.narrow(0, 40, 1);
  const std::vector<at::Tensor> rows{a, b, c};
  for (const bool left : {true, false}) {
    ForwardInput in;
    std::vector<at::Tensor> padded;
    for (const at::Tensor& row : rows) {
      const std::int64_t missing = 12 - row.size(0);
      padded.push_back(at::constant_pad_nd(
          row, left ? std::vector<std::int64_t>{missing, 0} : std::vector<std::int64_t>{0, missing}, 5));
      in.spans.push_back(left ? RowSpan{missing, 12} : RowSpan{0, row.size(0)});
    }
    in.tokens = at::stack(padded);
    const at::Tensor logits = tiny.logits(in);
    for (std::size_t r = 0; r < rows.size(); ++r) {
      INFO("row " << r << (left ? ", left" : ", right"));
      const RowSpan span = in.spans[r];
      const at::Tensor alone = tiny.logits(input(rows[r].unsqueeze(0)))[0];
      CHECK(largest_difference(logits[static_cast<std::int64_t>(r)].narrow(0, span.begin, span.end - span.begin),
                               alone) < 1e-5);
    }
  }
}

TEST_CASE("padded rows fill caches with their own tokens only") {
  const c10::InferenceMode inference;
  const Tiny tiny;
  const at::Tensor tokens = golden().at("tokens");
  ForwardInput in;
  in.tokens = at::stack({tokens.narrow(0, 0, 9), at::constant_pad_nd(tokens.narrow(0, 20, 5), {4, 0}, 7)});
  in.spans = {{0, 9}, {4, 9}};
  SequenceCache first = tiny.model->make_cache(20), second = tiny.model->make_cache(20);
  in.caches = {&first, &second};
  tiny.model->forward(in);
  CHECK(first.length() == 9);
  CHECK(second.length() == 5);
  ForwardInput next = input(at::stack({tokens.narrow(0, 9, 1), tokens.narrow(0, 25, 1)}));
  next.caches = in.caches;
  const at::Tensor logits = tiny.logits(next);
  CHECK(largest_difference(logits[0][0], tiny.logits(input(tokens.narrow(0, 0, 10).unsqueeze(0)))[0][9]) < 1e-5);
  CHECK(largest_difference(logits[1][0], tiny.logits(input(tokens.narrow(0, 20, 6).unsqueeze(0)))[0][5]) < 1e-5);
  in.spans = {{0, 9}, {4, 10}};
  CHECK_THROWS_WITH(tiny.model->forward(in), Contains("must lie within its 9 places"));
  in.caches = {&first};
  CHECK_THROWS_WITH(tiny.model->forward(in), Contains("2 rows need as many spans and caches or none"));
}

TEST_CASE("a gradient reaches whatever asks for one, alone") {
  const Tiny tiny;
  const auto has_graph = [&](const std::function<void(LlamaWeights&)>& change, std::int64_t length) {
    LlamaWeights weights = map_weights(*tiny.checkpoint);
    change(weights);
    const Llama model(tiny.checkpoint->config(), weights, at::kFloat);
    return model.logits(model.forward(input(golden_tokens(length))).last).requires_grad();
  };
  const auto trained = [](at::Tensor& t) { t = t.clone().requires_grad_(true); };
  for (const std::int64_t length : {3, 40}) {  // few rows and many take different kernels
    INFO(length);
    CHECK_FALSE(has_graph([](LlamaWeights&) {}, length));
    CHECK(has_graph([&](LlamaWeights& w) { trained(w.norm); }, length));
    CHECK(has_graph([&](LlamaWeights& w) { trained(w.layers[0].input_norm); }, length));
    CHECK(has_graph([&](LlamaWeights& w) { trained(w.layers[1].q.weight); }, length));
    CHECK(has_graph([&](LlamaWeights& w) { trained(w.layers[1].down.bias); }, length));
  }
}

TEST_CASE("given positions that are the implied ones change nothing, and a common shift hardly anything") {
  const c10::InferenceMode inference;
  const Tiny tiny;
  ForwardInput in = input(golden_tokens(40));
  const at::Tensor implied = tiny.logits(in);
  in.positions = at::arange(40).unsqueeze(0);
  CHECK(at::equal(tiny.logits(in), implied));
  in.positions = at::arange(100, 140).unsqueeze(0);
  CHECK(largest_difference(tiny.logits(in), implied) < 1e-3);
  in.positions = at::arange(0, 80, 2).unsqueeze(0);
  CHECK(largest_difference(tiny.logits(in), implied) > 1e-2);
}

TEST_CASE("a cache filled at once, in pieces or token by token gives the uncached logits") {
  const c10::InferenceMode inference;
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    const Tiny tiny("default", dtype);
    const at::Tensor tokens = golden_tokens(40);
    const at::Tensor whole = tiny.logits(input(tokens));
    for (const std::vector<std::int64_t>& pieces : {std::vector<std::int64_t>{40}, {13, 1, 1, 25}, {1, 38, 1}}) {
      SequenceCache cache = tiny.model->make_cache(40);
      std::vector<at::Tensor> parts;
      std::int64_t begin = 0;
      for (const std::int64_t count : pieces) {
        ForwardInput in = input(tokens.narrow(1, begin, count));
        in.caches = {&cache};
        parts.push_back(tiny.logits(in));
        begin += count;
      }
      CHECK(cache.length() == 40);
      CHECK(largest_difference(at::cat(parts, 1), whole) < 2e-5);
      ForwardInput over = input(tokens.narrow(1, 0, 1));
      over.caches = {&cache};
      CHECK_THROWS_WITH(tiny.model->forward(over), Contains("the cache was made for 40"));
    }
  }
}

TEST_CASE("a cache behind a long past is exact across blocks of queries") {
  const c10::InferenceMode inference;
  const Tiny tiny("default", at::kDouble);
  const at::Tensor tokens = golden().at("tokens").repeat({8}).unsqueeze(0);  // 640 tokens: more than two blocks
  const at::Tensor whole = tiny.logits(input(tokens));
  SequenceCache cache = tiny.model->make_cache(640);
  std::vector<at::Tensor> parts;
  for (const auto& [begin, count] : {std::pair<std::int64_t, std::int64_t>{0, 30}, {30, 610}}) {
    ForwardInput in = input(tokens.narrow(1, begin, count));
    in.caches = {&cache};
    parts.push_back(tiny.logits(in));
  }
  CHECK(largest_difference(at::cat(parts, 1), whole) < 1e-9);
}

TEST_CASE("losses come in blocks and equal those from all logits") {
  const c10::InferenceMode inference;
  const Tiny tiny;
  const at::Tensor hidden = tiny.model->forward(input(golden_tokens(40))).last[0];
  const at::Tensor targets = golden().at("tokens").narrow(0, 1, 40);
  const at::Tensor expected =
      at::nll_loss(at::log_softmax(tiny.model->logits(hidden), 1), targets, {}, at::Reduction::None);
  CHECK(largest_difference(token_losses(*tiny.model, hidden, targets), expected) < 1e-5);
  // A vocabulary so large that a block is a few tokens.
  const Linear wide{at::randn({5'000'000, 2}, at::kDouble), {}};
  ModelConfig config;
  config.vocab_size = 5'000'000;
  const Llama head_only(config, {{}, {}, {}, wide}, at::kDouble);
  const at::Tensor few = at::randn({7, 2}, at::kDouble), chosen = at::tensor({0, 1, 2, 3, 4, 4'999'999, 6}, at::kLong);
  const at::Tensor all =
      at::nll_loss(at::log_softmax(at::linear(few, wide.weight), 1), chosen, {}, at::Reduction::None);
  CHECK(largest_difference(token_losses(head_only, few, chosen), all) < 1e-9);
}

TEST_CASE("losses of many tokens, whose head goes a slice at a time, equal those from all logits") {
  at::manual_seed(4);
  for (const at::ScalarType stored : {at::kFloat, at::kBFloat16}) {
    INFO(at::toString(stored));
    const Linear head{at::randn({300'001, 4}).to(stored), {}};  // blocks of 55 tokens, and a slice that is not whole
    ModelConfig config;
    config.vocab_size = 300'001;
    const Llama model(config, {{}, {}, {}, head}, at::kFloat);
    const at::Tensor hidden = at::randn({70, 4}), targets = at::randint(config.vocab_size, {70}, at::kLong);
    const at::Tensor logits = at::linear(hidden.to(at::kDouble), head.weight.to(at::kDouble));
    const at::Tensor all = at::nll_loss(at::log_softmax(logits, 1), targets, {}, at::Reduction::None);
    CHECK(largest_difference(token_losses(model, hidden, targets), all) < 1e-4);
  }
}

TEST_CASE("token ids outside the vocabulary are refused with the id and the range") {
  const Tiny tiny;
  CHECK_THROWS_WITH(tiny.model->forward(input(at::tensor({1, 61}).unsqueeze(0))),
                    "[model] token id 61 is out of range: the vocabulary has 61 tokens (0 to 60).");
  CHECK_THROWS_WITH(tiny.model->forward(input(at::tensor({-1}).unsqueeze(0))), Contains("token id -1 is out of range"));
}

}  // namespace model_test
