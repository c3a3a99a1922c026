#include "eval/shift.h"

#include "eval/layers.h"

namespace tapetune {

namespace {

ShiftDifference compare(const Llama& model, const LayerViews& a, const LayerViews& b) {
  const auto mean = [](const at::Tensor& x, const at::Tensor& y) {
    return x.defined() ? (x - y).abs().mean().item<double>() : 0.0;
  };
  ShiftDifference difference;
  for (std::int64_t i = 0; i < model.config().layers; ++i) {
    const LayerView before = a.layer(i), after = b.layer(i);
    difference.layers.push_back({mean(before.attention, after.attention), mean(before.position, after.position)});
  }
  difference.logits = (a.logits() - b.logits()).abs().max().item<double>();
  return difference;
}

}  // namespace

ShiftDifference shifted_ids(const Llama& model, const std::vector<std::int64_t>& tokens, std::int64_t by) {
  return compare(model, LayerViews(model, tokens), LayerViews(model, tokens, by));
}

ShiftDifference added_tokens(const Llama& model, const std::vector<std::int64_t>& tokens, std::int64_t token,
                             std::int64_t count) {
  std::vector<std::int64_t> longer(static_cast<std::size_t>(count), token);
  longer.insert(longer.end(), tokens.begin(), tokens.end());
  return compare(model, LayerViews(model, tokens), LayerViews(model, longer, 0, count));
}

}  // namespace tapetune
