#include "kernels/attention.h"

#include <ATen/Parallel.h>

#include "catch.h"

namespace attention_test {

using namespace tapetune;
using namespace tapetune::kernels;

namespace {

struct Case {
  std::int64_t batch, queries, keys, heads, key_heads, width;
  bool extra;
  Visible visible;
  bool biased = false;
};

struct Tensors {
  at::Tensor q, k, v, extra_values, d_values, d_extra_output;
  at::Tensor bias = {};
};

using Starts = std::vector<std::int64_t>;

// Other starts for the second half of the heads.
Visible halves(std::int64_t heads, Starts first, Starts second, std::int64_t window = 0) {
  Visible visible{{}, window};
  if (!first.empty()) visible.regions.push_back({-1, 0, heads / 2, std::move(first)});
  if (!second.empty()) visible.regions.push_back({-1, heads / 2, -1, std::move(second)});
  return visible;
}

Visible window(std::int64_t keys) { return {{}, keys}; }

Tensors random(const Case& c) {
  const auto numbers = [&](std::int64_t tokens, std::int64_t heads) {
    return at::randn({c.batch, tokens, heads, c.width}, at::kFloat);
  };
  Tensors t{numbers(c.queries, c.heads),  numbers(c.keys, c.key_heads),
            numbers(c.keys, c.key_heads), {},
            numbers(c.queries, c.heads),  {}};
  if (c.extra) t.extra_values = numbers(c.keys, c.key_heads), t.d_extra_output = numbers(c.queries, c.heads);
  if (c.biased) t.bias = at::randn({c.heads, c.keys + 3}, at::kFloat);
  return t;
}

// [B, H, N, M]: who is not seen.
at::Tensor hidden(const Case& c) {
  at::Tensor mask = at::ones({c.batch, c.heads, c.queries, c.keys}, at::kBool);
  auto at = mask.accessor<bool, 4>();
  for (std::int64_t b = 0; b < c.batch; ++b) {
    for (std::int64_t h = 0; h < c.heads; ++h) {
      for (std::int64_t n = 0; n < c.queries; ++n) {
        const std::int64_t here = c.keys - c.queries + n;
        std::int64_t from = c.visible.window == 0 ? 0 : std::max<std::int64_t>(0, here - c.visible.window + 1);
        for (const Visible::Region& region : c.visible.regions) {
          if (region.row >= 0 && region.row != b) continue;
          if (h < region.head || (region.heads >= 0 && h >= region.head + region.heads)) continue;
          for (const std::int64_t start : region.starts) from = start <= here ? std::max(from, start) : from;
        }
        for (std::int64_t m = from; m <= here; ++m) at[b][h][n][m] = false;
      }
    }
  }
  return mask;
}

// The same in f64, with the whole matrix of scores.
Attended plain(const Case& c, const Tensors& t, double scale) {
  const auto by_head = [&](const at::Tensor& x) {  // [B, H, M, D]
    return x.repeat_interleave(c.heads / x.size(2), 2).transpose(1, 2);
  };
  at::Tensor scores = at::matmul(by_head(t.q), by_head(t.k).transpose(2, 3)) * scale;  // [B, H, N, M]
  if (t.bias.defined()) {
    const at::Tensor back =
        at::arange(c.keys - c.queries, c.keys).unsqueeze(1) - at::arange(c.keys).unsqueeze(0);  // [N, M]
    scores = scores + t.bias.index({at::indexing::Slice(), back.clamp_min(0)});
  }
  scores = scores.masked_fill(hidden(c), -std::numeric_limits<double>::infinity());
  const at::Tensor weights = at::softmax(scores, -1);
  Attended out;
  out.values = at::matmul(weights, by_head(t.v)).transpose(1, 2);
  if (c.extra) out.extra_output = at::matmul(weights, by_head(t.extra_values)).transpose(1, 2);
  out.lse = at::logsumexp(scores, -1);
  return out;
}

double error(const at::Tensor& x, const at::Tensor& exact) {
  REQUIRE(x.sizes() == exact.sizes());
  CHECK(x.isfinite().all().item<bool>());
  const double difference = (x.to(at::kDouble) - exact).abs().max().item<double>();
  return difference / std::max(1.0, exact.abs().max().item<double>());
}

constexpr double tolerance = 1e-5;  // of the largest number, or of 1 where all are smaller

void compare(const Case& c, const Tensors& t, double scale, double allowed = tolerance) {
  const Scores scores{scale, c.visible, t.bias};
  const auto leaf = [](const at::Tensor& x) {
    return x.defined() ? x.detach().to(at::kDouble).clone().requires_grad_(true) : x;
  };
  const Tensors wide{leaf(t.q), leaf(t.k), leaf(t.v), leaf(t.extra_values), {}, {}, leaf(t.bias)};
  const Attended exact = plain(c, wide, scale);
  const Attended out = attention_forward(t.q, t.k, t.v, t.extra_values, scores);
  CHECK(out.values.is_contiguous());
  CHECK(error(out.values, exact.values.detach()) < allowed);
  CHECK(error(out.lse, exact.lse.detach()) < allowed);
  CHECK(out.extra_output.defined() == c.extra);
  if (c.extra) CHECK(error(out.extra_output, exact.extra_output.detach()) < allowed);

  at::Tensor loss = (exact.values * t.d_values).sum();
  if (t.d_extra_output.defined()) loss = loss + (exact.extra_output * t.d_extra_output).sum();
  loss.backward();
  const AttentionGradients d =
      attention_backward(t.q, t.k, t.v, t.extra_values, out, t.d_values, t.d_extra_output, scores, c.extra, c.biased);
  CHECK(error(d.q, wide.q.grad()) < allowed);
  CHECK(error(d.k, wide.k.grad()) < allowed);
  CHECK(error(d.v, wide.v.grad()) < allowed);
  CHECK(d.extra_values.defined() == c.extra);
  if (t.d_extra_output.defined()) CHECK(error(d.extra_values, wide.extra_values.grad()) < allowed);
  CHECK(d.bias.defined() == c.biased);
  if (c.biased) CHECK(error(d.bias, wide.bias.grad()) < allowed);
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.defined() == b.defined() && (!a.defined() || at::equal(a, b));
}

const std::vector<Case>& cases() {
  static const std::vector<Case> all{
      {1, 1, 1, 1, 1, 16, false, {}},
      {1, 5, 5, 2, 2, 6, true, {}},
      {2, 37, 37, 4, 2, 8, true, {}},
      {1, 97, 97, 3, 1, 12, false, {}},
      {1, 131, 131, 6, 3, 16, true, {}},
      {1, 200, 200, 2, 2, 48, true, {}},
      {2, 193, 193, 4, 1, 64, false, {}},
      {1, 419, 419, 4, 2, 64, true, {}},
      {1, 250, 250, 2, 1, 128, true, {}},
      {1, 64, 64, 1, 1, 256, false, {}},
      {1, 300, 300, 4, 2, 16, true, halves(4, {0, 100, 200}, {0, 50, 150, 250})},
      {2, 211, 211, 4, 1, 64, true, halves(4, {0, 1, 2, 17, 129}, {0, 210})},
      {1, 150, 150, 3, 3, 6, true, halves(3, {}, {0, 75})},
      {1, 240, 240, 2, 2, 32, false, halves(2, {0, 96, 192}, {0, 96, 192})},
      {1, 40, 300, 4, 2, 64, true, {}},
      {2, 7, 23, 2, 2, 8, true, {}},
      {1, 1, 500, 4, 1, 64, false, {}},
      {1, 130, 171, 2, 1, 16, true, {}},
      {1, 300, 407, 1, 1, 32, true, {}},
      {1, 803, 803, 3, 1, 16, true, {}},
      {2, 803, 803, 2, 1, 8, true, {}},
      {1, 613, 700, 2, 1, 5, true, {}},
      {1, 431, 431, 4, 2, 8, false, {}},
      {1, 1001, 1001, 2, 2, 8, true, halves(2, {0, 200}, {0, 100})},
      // windows, which cut tiles of keys, blocks of queries and chunks of keys everywhere
      {1, 300, 300, 2, 1, 16, true, window(1)},
      {1, 300, 300, 2, 2, 64, true, window(2)},
      {2, 403, 403, 4, 2, 64, true, window(7)},
      {1, 403, 403, 2, 1, 8, false, window(16)},
      {1, 500, 500, 2, 2, 48, true, window(95)},
      {1, 500, 500, 3, 1, 64, false, window(97)},
      {1, 900, 900, 2, 1, 64, true, window(384)},
      {1, 1003, 1003, 2, 2, 12, true, window(400)},
      {1, 901, 901, 1, 1, 128, false, window(600)},
      {1, 130, 803, 2, 1, 64, true, window(50)},
      {1, 3, 803, 2, 1, 16, true, window(1)},
      {1, 97, 803, 2, 2, 16, false, window(700)},
      {1, 403, 403, 4, 2, 16, true, halves(4, {0, 100, 200}, {0, 50, 250}, 60)},
      {3, 150, 150, 2, 1, 16, true, {{{0, 0, -1, {0, 40}}, {2, 0, 1, {0, 7, 90}}, {-1, 1, 1, {0, 100}}}, 0}},
      {3, 150, 150, 2, 1, 16, true, {{{0, 0, -1, {0, 40}}, {2, 0, 1, {0, 7, 90}}}, 20}},
      // a bias by distance
      {1, 5, 5, 2, 2, 6, true, {}, true},
      {2, 97, 97, 3, 1, 12, false, {}, true},
      {1, 419, 419, 4, 2, 64, true, {}, true},
      {1, 803, 803, 2, 2, 64, false, {}, true},
      {1, 1001, 1001, 1, 1, 8, true, {}, true},
      {1, 40, 300, 4, 2, 64, true, {}, true},
      {1, 1, 500, 4, 1, 64, false, {}, true},
      {1, 403, 403, 4, 2, 16, true, halves(4, {0, 100, 200}, {0, 50, 250}, 60), true},
      {1, 901, 901, 2, 1, 64, true, window(384), true},
      {3, 150, 150, 2, 1, 16, true, {{{0, 0, -1, {0, 40}}, {2, 0, 1, {0, 7, 90}}}, 20}, true},
  };
  return all;
}

std::string described(const Case& c) {
  return fmt::format("{} x {} of {}, heads {}/{} x {}, {} regions, window {}{}{}", c.batch, c.queries, c.keys, c.heads,
                     c.key_heads, c.width, c.visible.regions.size(), c.visible.window, c.extra ? ", extra values" : "",
                     c.biased ? ", bias" : "");
}

Tensors converted(const Tensors& t, at::ScalarType dtype) {
  const auto to = [&](const at::Tensor& x) { return x.defined() ? x.to(dtype) : x; };
  return {to(t.q),
          to(t.k),
          to(t.v),
          to(t.extra_values),
          to(t.d_values),
          to(t.d_extra_output),
          dtype == at::kDouble ? to(t.bias) : t.bias};
}

}  // namespace

TEST_CASE("tiled attention and its gradients equal the plain formulas in f64") {
  at::manual_seed(1);
  for (const Case& c : cases()) {
    INFO(described(c));
    compare(c, random(c), 1 / std::sqrt(static_cast<double>(c.width)));
  }
}

TEST_CASE("attention by blocks of queries and its gradients equal the plain formulas, in f64 and bf16") {
  at::manual_seed(1);
  for (const Case& c : cases()) {
    INFO(described(c));
    const Tensors t = random(c);
    const double scale = 1 / std::sqrt(static_cast<double>(c.width));
    compare(c, converted(t, at::kDouble), scale, 1e-12);
    compare(c, converted(t, at::kBFloat16), scale, 2e-2);
  }
}

TEST_CASE("attention reads views: heads before tokens, a part of wider rows, and the same extra values for all heads") {
  at::manual_seed(2);
  const Case c{2, 110, 110, 4, 2, 16, true, {}};
  Tensors t = random(c);
  t.q = at::randn({2, 4, 110, 16}).transpose(1, 2);
  t.k = at::randn({2, 110, 2, 40}).narrow(-1, 7, 16);
  t.v = at::randn({110, 2, 2, 16}).transpose(0, 1);
  t.extra_values = at::randn({1, 110, 1, 16}).expand({2, 110, 2, 16});
  t.d_values = at::randn({2, 110, 16, 4}).transpose(2, 3);
  t.d_extra_output = at::randn({1, 1, 1, 16}).expand({2, 110, 4, 16});
  compare(c, t, 0.25);
}

TEST_CASE("without a gradient of the extra output, the rest has its own and extra values get zeros") {
  at::manual_seed(3);
  const Case c{1, 120, 120, 2, 2, 16, true, {}};
  Tensors t = random(c);
  t.d_extra_output = at::Tensor();
  compare(c, t, 0.25);
  const Attended out = attention_forward(t.q, t.k, t.v, t.extra_values, {.scale = 0.25});
  const auto backward = [&](bool need) {
    return attention_backward(t.q, t.k, t.v, t.extra_values, out, t.d_values, {}, {.scale = 0.25}, need, false);
  };
  CHECK(backward(true).extra_values.abs().max().item<double>() == 0.0);
  CHECK_FALSE(backward(false).extra_values.defined());
}

TEST_CASE("large scores give neither infinities nor NaN") {
  at::manual_seed(4);
  const Case c{1, 230, 230, 2, 1, 64, true, {}};
  Tensors t = random(c);
  // Few bits a number, so that the scores are exact in f32 and the comparison with f64 is fair.
  for (at::Tensor* x : {&t.q, &t.k}) *x = (*x * 4).round();
  compare(c, t, 0.25, 1e-4);
  for (const double scale : {16.0, 1e4, -1e4, 0.0}) {
    INFO(scale);
    const Attended out = attention_forward(t.q, t.k, t.v, t.extra_values, {.scale = scale});
    CHECK(out.values.isfinite().all().item<bool>());
    CHECK(out.lse.isfinite().all().item<bool>());
    CHECK((out.values.abs().max() <= t.v.abs().max() * 1.0001).item<bool>());
    const AttentionGradients d = attention_backward(t.q, t.k, t.v, t.extra_values, out, t.d_values, t.d_extra_output,
                                                    {.scale = scale}, true, false);
    for (const at::Tensor& x : {d.q, d.k, d.v, d.extra_values}) CHECK(x.isfinite().all().item<bool>());
  }
}

TEST_CASE(
    "attention has the same bits with extra values, with any number of threads and in any portion of the queries") {
  at::manual_seed(5);
  const Case c{1, 1033, 1033, 6, 3, 48, true, {}, true};
  const Tensors t = random(c);
  const int threads = at::get_num_threads();
  for (const Scores& used : {Scores{0.1, {}, {}}, Scores{0.1, halves(6, {0, 130, 300}, {0, 900}), {}},
                             Scores{0.1, window(500), {}}, Scores{0.1, {}, t.bias}}) {
    const bool biased = used.bias.defined();
    const auto forward = [&](const at::Tensor& extra) { return attention_forward(t.q, t.k, t.v, extra, used); };
    const auto backward = [&](const Attended& out) {
      return attention_backward(t.q, t.k, t.v, t.extra_values, out, t.d_values, t.d_extra_output, used, true, biased);
    };
    at::set_num_threads(1);
    const Attended one = forward(t.extra_values);
    const AttentionGradients d_one = backward(one);
    at::set_num_threads(2);
    const Attended two = forward(t.extra_values);
    const AttentionGradients d_two = backward(two);
    at::set_num_threads(threads);
    CHECK(same_bits(one.values, two.values));
    CHECK(same_bits(one.extra_output, two.extra_output));
    CHECK(same_bits(one.lse, two.lse));
    CHECK(same_bits(d_one.q, d_two.q));
    CHECK(same_bits(d_one.k, d_two.k));
    CHECK(same_bits(d_one.v, d_two.v));
    CHECK(same_bits(d_one.extra_values, d_two.extra_values));
    CHECK(same_bits(d_one.bias, d_two.bias));
    CHECK(same_bits(one.values, forward({}).values));
    CHECK(same_bits(one.lse, forward({}).lse));
  }
  const Attended whole = attention_forward(t.q, t.k, t.v, {}, {.scale = 0.1});
  const Attended last = attention_forward(t.q.narrow(1, 750, 283), t.k, t.v, {}, {.scale = 0.1});
  CHECK(same_bits(whole.values.narrow(1, 750, 283), last.values));
}

TEST_CASE("a token's attention does not change by a bit with what follows it, or with what lies before its cut") {
  at::manual_seed(6);
  const Case c{1, 290, 290, 2, 2, 16, true, {}};
  const Tensors t = random(c);
  const Scores scores{0.25, {{{.starts = {0, 100}}}, 0}, {}};
  const Attended before = attention_forward(t.q, t.k, t.v, t.extra_values, scores);
  for (const std::int64_t n : {0, 3, 99, 100, 101, 196, 288}) {
    INFO(n);
    const auto changed = [&](const at::Tensor& x, std::int64_t from, std::int64_t count) {
      at::Tensor copy = x.clone();
      copy.narrow(1, from, count).add_(100);
      return copy;
    };
    const std::int64_t rest = 290 - n - 1;
    const Attended after = attention_forward(changed(t.q, n + 1, rest), changed(t.k, n + 1, rest),
                                             changed(t.v, n + 1, rest), changed(t.extra_values, n + 1, rest), scores);
    CHECK(same_bits(before.values.narrow(1, 0, n + 1), after.values.narrow(1, 0, n + 1)));
    CHECK(same_bits(before.extra_output.narrow(1, 0, n + 1), after.extra_output.narrow(1, 0, n + 1)));
    CHECK_FALSE(same_bits(before.values.select(1, n + 1), after.values.select(1, n + 1)));
    if (n >= 100) {
      const Attended cut =
          attention_forward(t.q, changed(t.k, 0, 100), changed(t.v, 0, 100), changed(t.extra_values, 0, 100), scores);
      CHECK(same_bits(before.values.select(1, n), cut.values.select(1, n)));
    }
  }
}

TEST_CASE("a window as long as the text changes no bit, and what lies before it none of a token's attention") {
  at::manual_seed(8);
  const Case c{1, 700, 700, 2, 1, 64, true, {}};
  const Tensors t = random(c);
  const auto forward = [&](std::int64_t keys, const at::Tensor& k) {
    return attention_forward(t.q, k, t.v, t.extra_values, {0.125, window(keys), {}});
  };
  const Attended full = forward(0, t.k);
  CHECK(same_bits(forward(700, t.k).values, full.values));
  CHECK(same_bits(forward(9000, t.k).extra_output, full.extra_output));
  CHECK_FALSE(same_bits(forward(699, t.k).values, full.values));
  at::Tensor other = t.k.clone();
  other.narrow(1, 0, 300).add_(1);
  CHECK(same_bits(forward(100, other).values.narrow(1, 399, 301), forward(100, t.k).values.narrow(1, 399, 301)));
  CHECK_FALSE(same_bits(forward(101, other).values.select(1, 399), forward(101, t.k).values.select(1, 399)));
}

TEST_CASE("attention refuses shapes and starts that do not fit") {
  const at::Tensor q = at::zeros({1, 4, 2, 8}), k = at::zeros({1, 4, 2, 8}), past = at::zeros({1, 6, 2, 8});
  const auto with = [&](const at::Tensor& keys, const Visible& visible, const at::Tensor& bias = {}) {
    attention_forward(q, keys, keys, {}, {1.0, visible, bias});
  };
  CHECK_NOTHROW(with(k, halves(2, {0, 2}, {})));
  CHECK_THROWS_WITH(with(k, halves(2, {1, 2}, {})), Contains("starts must begin at 0"));
  CHECK_THROWS_WITH(with(k, halves(2, {}, {0, 2, 2})), Contains("increase"));
  CHECK_THROWS_WITH(with(k, halves(2, {0, 4}, {})), Contains("within 4 tokens"));
  CHECK_THROWS_WITH(with(past, halves(2, {0, 2}, {})), Contains("without past keys"));
  CHECK_THROWS_WITH(with(k, window(-1)), Contains("less than one"));
  CHECK_THROWS_WITH(with(k.narrow(1, 0, 3), {}), Contains("do not go with keys"));
  CHECK_THROWS_WITH(with(k.to(at::kDouble), {}), Contains("one dtype and one device"));
  CHECK_THROWS_WITH(with(k, {}, at::zeros({2, 3})), Contains("at least 4 distances"));
  CHECK_THROWS_WITH(with(k, {}, at::zeros({1, 4})), Contains("bias [1, 4] is none of 2 heads"));
}

}  // namespace attention_test
