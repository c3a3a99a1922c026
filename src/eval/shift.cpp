#include "eval/shift.h"

#include "kernels/pointwise.h"

namespace tapetune {

namespace {

struct Seen {
  std::vector<at::Tensor> attention;  // a layer each: [H, N, N]
  std::vector<at::Tensor> position;   // a layer each: [C, N, N]
  at::Tensor logits;                  // [N, vocab]
};

// The texts are short, so that the N x N matrices may exist here.
Seen look(const Llama& model, const std::vector<std::int64_t>& tokens, std::int64_t first_position, std::int64_t from) {
  const ModelConfig& config = model.config();
  const auto length = static_cast<std::int64_t>(tokens.size());
  ForwardInput in;
  in.tokens = at::tensor(tokens, at::kLong).unsqueeze(0);
  in.positions = at::arange(first_position, first_position + length).unsqueeze(0);
  in.planned_length = length;  // the same frequencies wherever the text stands
  in.all_hidden = in.all_positions = true;
  const ForwardOutput out = model.forward(in);
  const std::int64_t kept = length - from;
  const at::Tensor later = at::ones({kept, kept}, out.last.options().dtype(at::kBool)).triu(1);
  Seen seen;
  for (std::int64_t i = 0; i < config.layers; ++i) {
    const auto layer = static_cast<std::size_t>(i);
    const LayerWeights& w = model.weights().layers[layer];
    const at::Tensor normed = kernels::rms_norm(out.hidden[layer], w.input_norm, config.rms_norm_eps);
    const Projection which[] = {Projection::q, Projection::k};
    const Linear frozen[] = {w.q, w.k};
    const auto qk = model.seams().linear->project({i, which, frozen, nullptr, false}, normed);
    const at::Tensor& position = out.positions[layer];  // [1, N, C, D]
    const auto rotated = [&](const at::Tensor& x) {
      const at::Tensor heads = x.view({1, length, -1, config.head_dim});
      return kernels::rotate(heads, position)[0].narrow(0, from, kept).transpose(0, 1).to(at::kDouble);  // [H, n, D]
    };
    const at::Tensor q = rotated(qk[0]), k = rotated(qk[1]).repeat_interleave(config.heads / config.kv_heads, 0);
    const at::Tensor scores = at::matmul(q, k.transpose(1, 2)) / std::sqrt(static_cast<double>(config.head_dim));
    seen.attention.push_back(at::softmax(scores.masked_fill(later, -INFINITY), -1));
    const at::Tensor e = position[0].narrow(0, from, kept).transpose(0, 1).to(at::kDouble);  // [C, n, D]
    seen.position.push_back(at::matmul(e, e.transpose(1, 2)) * (2.0 / static_cast<double>(config.head_dim)));
  }
  seen.logits = model.logits(out.last[0]).narrow(0, from, kept).to(at::kDouble);
  return seen;
}

ShiftDifference compare(const Seen& a, const Seen& b) {
  const auto mean = [](const at::Tensor& x, const at::Tensor& y) { return (x - y).abs().mean().item<double>(); };
  ShiftDifference difference;
  for (std::size_t i = 0; i < a.attention.size(); ++i) {
    difference.layers.push_back({mean(a.attention[i], b.attention[i]), mean(a.position[i], b.position[i])});
  }
  difference.logits = (a.logits - b.logits).abs().max().item<double>();
  return difference;
}

}  // namespace

ShiftDifference shifted_ids(const Llama& model, const std::vector<std::int64_t>& tokens, std::int64_t by) {
  return compare(look(model, tokens, 0, 0), look(model, tokens, by, 0));
}

ShiftDifference added_tokens(const Llama& model, const std::vector<std::int64_t>& tokens, std::int64_t token,
                             std::int64_t count) {
  std::vector<std::int64_t> longer(static_cast<std::size_t>(count), token);
  longer.insert(longer.end(), tokens.begin(), tokens.end());
  return compare(look(model, tokens, 0, 0), look(model, longer, 0, count));
}

}  // namespace tapetune
