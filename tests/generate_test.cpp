#include <c10/core/InferenceMode.h>

#include "catch.h"
#include "core/json.h"
#include "model/generate.h"
#include "support.h"

namespace generate_test {

using namespace tapetune;
using namespace tapetune::test;

namespace {

Llama tiny_model(const TempFolder& folder, const std::string& variant) {
  tiny_checkpoint(folder.path(), variant);
  return Llama::open(Checkpoint::open(folder.path()), at::kFloat);
}

const std::vector<std::vector<std::int64_t>> prompts{{1, 5, 9, 20}, {1}, {1, 7, 7, 30, 31, 32, 33, 34, 35}, {40, 41}};

}  // namespace

TEST_CASE("cached generation equals uncached for every rotary variant, across the original context") {
  const c10::InferenceMode inference;
  const TempFolder folder;
  const Json configs = from_text(read_file(data("tiny-configs.json")));
  for (const auto& [name, config] : configs.items()) {
    INFO(name);
    const Llama model = tiny_model(folder, name);
    GenerateOptions options;
    options.max_new_tokens = 70;
    options.context = 96;
    const std::vector<Generated> cached = generate(model, prompts, options);
    options.use_cache = false;
    const std::vector<Generated> uncached = generate(model, prompts, options);
    for (std::size_t i = 0; i < prompts.size(); ++i) CHECK(cached[i].tokens == uncached[i].tokens);
  }
}

TEST_CASE("prompts give the same tokens together as alone, greedy and sampled") {
  const c10::InferenceMode inference;
  const TempFolder folder;
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    INFO(dtype);
    tiny_checkpoint(folder.path(), "dynamic");
    const Llama model = Llama::open(Checkpoint::open(folder.path()), dtype);
    std::vector<std::vector<std::int64_t>> many;
    for (std::int64_t i = 0; i < 20; ++i)
      many.push_back(std::vector<std::int64_t>(static_cast<std::size_t>(1 + i % 7), 3 + i));
    for (const double temperature : {0.0, 0.8}) {
      GenerateOptions options;
      options.max_new_tokens = 25;
      options.eos = {11, 12};
      options.sampling = {temperature, 20, 0.9, 7};
      const std::vector<Generated> together = generate(model, many, options);
      for (std::size_t i = 0; i < many.size(); ++i) {
        INFO("prompt " << i << ", temperature " << temperature);
        const Generated alone = generate(model, {many[i]}, options)[0];
        CHECK(together[i].tokens == alone.tokens);
        CHECK(together[i].stop == alone.stop);
      }
    }
  }
}

TEST_CASE("generation stops at an end token, at the limit and at the context") {
  const c10::InferenceMode inference;
  const TempFolder folder;
  const Llama model = tiny_model(folder, "default");
  GenerateOptions options;
  options.max_new_tokens = 10;
  const Generated free = generate(model, {{1, 5}}, options)[0];
  CHECK(free.tokens.size() == 10);
  CHECK(free.stop == Stop::length);
  options.eos = {free.tokens[4]};
  const Generated ended = generate(model, {{1, 5}}, options)[0];
  CHECK(ended.stop == Stop::eos);
  CHECK(ended.tokens.back() == free.tokens[4]);
  CHECK(ended.tokens.size() <= 5);
  options.eos = {};
  options.context = 6;
  const Generated full = generate(model, {{1, 5}}, options)[0];
  CHECK(full.stop == Stop::context);
  CHECK(full.tokens.size() == 4);
  CHECK(generate(model, {{1, 2, 3, 4, 5, 6}}, options)[0].tokens.empty());
  CHECK_THROWS_WITH(generate(model, {{1, 2, 3, 4, 5, 6, 7}}, options), Contains("has 7 tokens, but the context is 6"));
  options.max_new_tokens = 0;
  CHECK(generate(model, {{1, 5}}, options)[0].stop == Stop::length);
}

TEST_CASE("sampling follows its options and its seed") {
  at::manual_seed(3);
  const at::Tensor logits = at::tensor({0.0F, 1.0F, 2.0F, 3.0F, -1.0F});
  const auto draw = [&](const SamplingOptions& options, int count) {
    Sampler sampler(options);
    std::vector<int> seen(5, 0);
    for (int i = 0; i < count; ++i) ++seen[static_cast<std::size_t>(sampler.next(logits))];
    return seen;
  };
  CHECK(draw({0.0, 0, 1.0, 0}, 5)[3] == 5);
  CHECK(draw({1.0, 1, 1.0, 0}, 50)[3] == 50);
  CHECK(draw({1.0, 0, 0.5, 0}, 50)[3] == 50);  // the most likely token alone holds more than half
  const std::vector<int> two = draw({1.0, 2, 1.0, 0}, 2000);
  CHECK(two[3] + two[2] == 2000);
  CHECK(std::abs(two[3] / 2000.0 - 0.731) < 0.04);  // e / (1 + e)
  const std::vector<int> all = draw({1.0, 0, 1.0, 0}, 4000);
  const at::Tensor expected = at::softmax(logits, 0);
  for (std::int64_t i = 0; i < 5; ++i) {
    CHECK(std::abs(all[static_cast<std::size_t>(i)] / 4000.0 - expected[i].item<double>()) < 0.03);
  }
  CHECK(draw({1.0, 0, 1.0, 5}, 40) == draw({1.0, 0, 1.0, 5}, 40));
  CHECK(draw({1.0, 0, 1.0, 5}, 40) != draw({1.0, 0, 1.0, 6}, 40));
  CHECK_THROWS_WITH(Sampler({-1.0, 0, 1.0, 0}), Contains("temperature must be 0 or more"));
  CHECK_THROWS_WITH(Sampler({1.0, 0, 1.5, 0}), Contains("top-p must be in (0, 1]"));
}

}  // namespace generate_test
