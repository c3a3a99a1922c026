// One training step of a method, timed: forward and backward of one sequence through a random 58M-parameter Llama. Or
// attention alone, with windows and biases. tools/bench step and attention run it; it prints one JSON object.
#include <ATen/Parallel.h>
#include <CLI/CLI.hpp>

#include <chrono>
#include <iostream>

#include "adapters/build_model.h"
#include "core/json.h"
#include "core/memory.h"
#include "kernels/attention.h"
#include "model/loss.h"
#include "plan/flops.h"

namespace {

using namespace tapetune;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

ModelConfig shape() {
  ModelConfig c;
  c.vocab_size = 32000;
  c.hidden_size = 512;
  c.intermediate_size = 1376;
  c.layers = 8;
  c.heads = c.kv_heads = 8;
  c.head_dim = 64;
  c.context = 4096;
  c.rms_norm_eps = 1e-5;
  return c;
}

double peak_gflops() {
  const std::int64_t n = 2048;
  const at::Tensor a = at::randn({n, n}), b = at::randn({n, n});
  at::Tensor c = at::empty({n, n});
  double best = 0;
  for (int i = 0; i < 8; ++i) {
    const double start = now();
    at::mm_out(c, a, b);
    best = std::max(best, 2e-9 * static_cast<double>(n * n * n) / (now() - start));
  }
  return best;
}

// Forward and backward of one layer's attention.
struct AttentionCase {
  std::string name;
  std::int64_t tokens;
  kernels::Scores scores;
  bool learns = false;
  std::vector<double> seconds = {};

  void measure(const ModelConfig& c) {
    const std::vector<std::int64_t> sizes{1, tokens, c.heads, c.head_dim};
    const at::Tensor q = at::randn(sizes), k = at::randn(sizes), v = at::randn(sizes), d = at::randn(sizes);
    const double start = now();
    const kernels::Attended out = kernels::attention_forward(q, k, v, {}, scores);
    kernels::attention_backward(q, k, v, {}, out, d, {}, scores, false, learns);
    seconds.push_back(now() - start);
  }
};

// In turns: everything at `tokens`, and for each window plain attention of as many pairs of query and key.
Json measure_attention(std::int64_t tokens, int repeat) {
  const ModelConfig c = shape();
  const double scale = 1 / std::sqrt(static_cast<double>(c.head_dim));
  const at::Tensor bias = -at::rand({c.heads, 1}) * at::arange(tokens, at::kFloat);
  std::vector<AttentionCase> cases{{"plain", tokens, {scale}},
                                   {"bias", tokens, {scale, {}, bias}},
                                   {"learned bias", tokens, {scale, {}, bias}, true}};
  for (const std::int64_t window : {1024, 2048, 4096}) {
    if (window >= tokens) continue;
    const kernels::Visible visible{{}, window};
    const double pairs = visible.pairs(tokens, 1);
    const auto alike = static_cast<std::int64_t>(std::llround(std::sqrt(2 * pairs)));
    cases.push_back({fmt::format("window {}", window), tokens, {scale, visible}});
    cases.push_back({fmt::format("plain like window {}", window), alike, {scale}});
  }
  for (int i = 0; i <= repeat; ++i) {
    for (AttentionCase& each : cases) each.measure(c);
  }
  Json all = Json::array();
  for (const AttentionCase& each : cases) {
    const std::vector<double> seconds(each.seconds.begin() + 1, each.seconds.end());
    all.push_back({{"name", each.name},
                   {"tokens", each.tokens},
                   {"pairs", each.scores.visible.pairs(each.tokens, c.heads)},
                   {"seconds", seconds}});
  }
  return all;
}

}  // namespace

int main(int argc, char** argv) {
  set_up_memory();  // as in the tapetune binary
  CLI::App app{"A timed training step of a random 58M-parameter Llama"};
  std::vector<std::string> method{"lora"};
  std::string checkpointing = "off", also;
  std::int64_t context = 1024;
  int repeat = 3, threads = 0;
  bool peak = false, attention = false;
  app.add_option("--method", method, "NAME [key=value ...]");
  app.add_option("--context", context, "Tokens of the sequence");
  app.add_option("--checkpointing", checkpointing)->check(CLI::IsMember({"off", "full", "selective"}));
  app.add_option("--train-also", also, "embeddings,norms,lm_head");
  app.add_option("--repeat", repeat, "Steps after the first, which warms up");
  app.add_option("--threads", threads);
  app.add_flag("--peak", peak, "Only measure the largest rate of a matrix product");
  app.add_flag("--attention", attention, "Only measure attention of one layer, with windows and biases");
  CLI11_PARSE(app, argc, argv);
  if (threads > 0) at::set_num_threads(threads);
  if (peak) {
    std::cout << to_text(Json{{"gflops", peak_gflops()}}) << "\n";
    return 0;
  }
  if (attention) {
    std::cout << to_text(Json{{"cases", measure_attention(context, repeat)}}) << "\n";
    return 0;
  }
  try {
    std::vector<std::string> overrides(method.begin() + 1, method.end());
    if (!also.empty()) overrides.push_back("train_also=" + also);
    const ModelConfig config = shape();
    const AdaptedModel adapted =
        adapt(config, random_weights(config, 1), parse_method(method.front(), overrides), at::kFloat);
    ForwardInput in;
    in.tokens = at::randint(config.vocab_size, {1, context}, at::kLong);
    in.training = Training{parse_checkpointing(checkpointing), 0};
    const at::Tensor targets = at::cat({in.tokens[0].narrow(0, 1, context - 1), at::full({1}, -100, at::kLong)});
    std::vector<double> seconds;
    double loss = 0, forward = 0, head = 0, backward = 0;
    for (int i = 0; i <= repeat; ++i) {
      for (const Parameter& p : adapted.parameters) p.value.mutable_grad().reset();
      const double start = now();
      const at::Tensor hidden = adapted.model.forward(in).last[0];
      const double after_forward = now();
      const at::Tensor sum = loss_sum(adapted.model, hidden, targets, in.training) / static_cast<double>(context - 1);
      const double after_loss = now();
      if (sum.requires_grad()) sum.backward();
      const double end = now();
      loss = sum.item<double>();
      if (i == 0) continue;
      seconds.push_back(end - start);
      forward += (after_forward - start) / repeat;
      head += (after_loss - after_forward) / repeat;
      backward += (end - after_loss) / repeat;
    }
    const Json parts = {{"forward", forward}, {"loss and its gradients", head}, {"backward", backward}};
    std::cout << to_text(Json{{"seconds", seconds},
                              {"flops", step_flops(adapted, context).total(config.layers)},
                              {"loss", loss},
                              {"parts", parts}})
              << "\n";
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
