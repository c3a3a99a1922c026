// Attention in shifted groups against a plain mask, and the promise that nobody sees the future.
#include "adapters/build_model.h"
#include "catch.h"
#include "model/attention.h"
#include "support.h"

namespace longlora_test {

using namespace tapetune;
using namespace tapetune::test;

namespace {

// [H, N, N]: true where a query may not look.
at::Tensor hidden_pairs(const kernels::Visible& visible, std::int64_t heads, std::int64_t length) {
  const at::Tensor hidden = at::ones({heads, length, length}, at::kBool);
  for (std::int64_t h = 0; h < heads; ++h) {
    const auto& starts = visible.regions[h < heads / 2 ? 0 : 1].starts;
    for (std::int64_t i = 0; i < length; ++i) {
      const std::int64_t begin = *(std::upper_bound(starts.begin(), starts.end(), i) - 1);
      hidden[h][i].narrow(0, begin, i + 1 - begin).fill_(false);
    }
  }
  return hidden;
}

AdaptedModel longlora(const std::vector<std::string>& words, at::ScalarType dtype) {
  const ModelConfig config = random_config(false);
  return adapt(config, random_weights(config, at::kDouble), parse_method("longlora", words), dtype);
}

}  // namespace

TEST_CASE("shifted groups: a quarter by default, half a group shifted, nothing wraps round") {
  const AdaptedModel adapted = longlora({}, at::kFloat);
  const Training training;
  const kernels::Visible visible =
      adapted.model.components().attention->visible({adapted.model.config(), 1024, &training});
  CHECK(visible.regions[0].starts == std::vector<std::int64_t>{0, 256, 512, 768});
  CHECK(visible.regions[1].starts == std::vector<std::int64_t>{0, 128, 384, 640, 896});
  CHECK(adapted.model.components().attention->visible({adapted.model.config(), 1024, nullptr}).regions.empty());
  const AdaptedModel fixed = longlora({"group=512"}, at::kFloat);
  CHECK(fixed.model.components().attention->visible({adapted.model.config(), 1024, &training}).regions[0].starts ==
        std::vector<std::int64_t>{0, 512});
}

TEST_CASE("shifted groups equal attention under a mask, forward and gradient") {
  for (const auto& [heads, kv_heads, dtype, tolerance] :
       {std::tuple<std::int64_t, std::int64_t, at::ScalarType, double>{4, 4, at::kFloat, 1e-5},
        {6, 3, at::kFloat, 1e-5},
        {6, 1, at::kFloat, 1e-5},
        {4, 2, at::kDouble, 1e-12},
        {6, 3, at::kDouble, 1e-12}}) {
    INFO(heads << " heads over " << kv_heads << " in " << dtype);
    at::manual_seed(1);
    const std::int64_t length = 64;
    const auto random = [&, d = dtype](std::int64_t h) {
      return at::randn({2, length, h, 16}, at::kDouble).to(d).requires_grad_(true);
    };
    AttentionInput in;
    in.q = random(heads);
    in.k = random(kv_heads);
    in.v = random(kv_heads);
    in.scores.scale = 0.25;
    in.scores.visible.regions = {{.head = 0, .heads = heads / 2, .starts = {0, 16, 32, 48}},
                                 {.head = heads / 2, .heads = heads / 2, .starts = {0, 8, 24, 40, 56}}};
    const at::Tensor out = causal_attention(in).values, weight = at::randn_like(out);
    const auto ours = torch::autograd::grad({(out * weight).sum()}, {in.q, in.k, in.v});

    const auto wide = [](const at::Tensor& t) { return t.detach().to(at::kDouble).requires_grad_(true); };
    const at::Tensor q = wide(in.q), k = wide(in.k), v = wide(in.v);
    const auto by_head = [&, h = heads](const at::Tensor& t) {
      return t.transpose(1, 2).repeat_interleave(h / t.size(2), 1);  // [B, H, N, D]
    };
    const at::Tensor scores = at::matmul(by_head(q), by_head(k).transpose(2, 3)) * in.scores.scale;
    const at::Tensor weights =
        at::softmax(scores.masked_fill(hidden_pairs(in.scores.visible, heads, length), -INFINITY), -1);
    const at::Tensor expected = at::matmul(weights, by_head(v)).transpose(1, 2);
    CHECK(largest_difference(out.detach(), expected.detach()) < tolerance);
    const auto theirs = torch::autograd::grad({(expected * weight.to(at::kDouble)).sum()}, {q, k, v});
    for (std::size_t i = 0; i < 3; ++i) {
      CHECK(largest_difference(ours[i], theirs[i]) < tolerance * 10);
    }
  }
}

TEST_CASE("shifted groups: no token depends on a later one, and evaluation attends to everything") {
  const c10::NoGradGuard evaluation;
  const AdaptedModel adapted = longlora({}, at::kFloat);
  const auto hidden = [&](const at::Tensor& tokens, bool training) {
    ForwardInput in;
    in.tokens = tokens.unsqueeze(0);
    if (training) in.training = Training{};
    return adapted.model.forward(in).last[0];
  };
  at::manual_seed(3);
  const at::Tensor tokens = at::randint(61, {32}, at::kLong), before = hidden(tokens, true);
  for (std::int64_t t = 1; t < 32; ++t) {
    at::Tensor changed = tokens.clone();
    changed.narrow(0, t, 32 - t).copy_((tokens.narrow(0, t, 32 - t) + 7) % 61);
    INFO(t);
    CHECK(at::equal(hidden(changed, true).narrow(0, 0, t), before.narrow(0, 0, t)));
    CHECK_FALSE(at::equal(hidden(changed, true)[t], before[t]));
  }
  CHECK(largest_difference(hidden(tokens, false), before) > 1e-2);
  const ModelConfig config = random_config(false);
  const Llama base(config, random_weights(config, at::kDouble), at::kFloat);
  ForwardInput in;
  in.tokens = tokens.unsqueeze(0);
  CHECK(largest_difference(hidden(tokens, false), base.forward(in).last[0]) < 1e-5);
}

}  // namespace longlora_test
