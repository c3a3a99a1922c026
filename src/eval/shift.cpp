#include "eval/shift.h"

#include <algorithm>

#include "adapters/component.h"
#include "core/error.h"
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

void draw_zeros(const AdaptedModel& adapted, double spread, std::uint64_t seed) {
  const c10::NoGradGuard drawing;
  at::manual_seed(seed);
  for (const Parameter& p : adapted.parameters) {
    if (p.value.count_nonzero().item<std::int64_t>() == 0) p.value.normal_(0, spread);
  }
}

std::string_view encoding_with_ablation() {
  const auto& all = position_components().all();
  return std::ranges::find_if(all, [](const PositionComponent& each) { return !each.ablation.empty(); })->name;
}

// With one of its positions' settings, "key=value".
MethodOptions with_position_setting(MethodOptions method, std::string_view setting) {
  const std::size_t equals = setting.find('=');
  set_setting(method, Section::positions, setting.substr(0, equals), setting.substr(equals + 1));
  return method;
}

Json difference_json(const ShiftDifference& difference) {
  Json layers = Json::array();
  for (const ShiftedLayer& layer : difference.layers) {
    layers.push_back({{"attention", layer.attention}, {"position", layer.position}});
  }
  return {{"layers", layers}, {"logits", difference.logits}};
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

std::vector<NamedModel> shift_models(const ModelConfig& config, const ShiftModels& models) {
  const c10::NoGradGuard evaluation;
  std::vector<NamedModel> all;
  all.push_back({"RoPE", models.load({})});
  const bool fresh = models.load_trained == nullptr;
  std::vector<std::string> method = models.method;
  if (fresh && method.empty()) method = {std::string(encoding_with_ablation())};
  all.push_back({"", fresh ? models.load(method) : models.load_trained()});
  const MethodOptions& options = all.back().adapted.options;
  const PositionComponent& encoding = position_component(options, config);
  if (encoding.ablation.empty()) {
    all.back().name = options.name();
  } else if (options == with_position_setting(options, encoding.ablation)) {
    all.back().name = encoding.ablated;
  } else {
    all.back().name = encoding.title;
    method.emplace_back(encoding.ablation);
    if (fresh) all.push_back({std::string(encoding.ablated), models.load(method)});
  }
  for (std::size_t i = 1; fresh && i < all.size(); ++i) draw_zeros(all[i].adapted, models.spread, models.seed);
  return all;
}

std::vector<ShiftResult> measure_shifts(const std::vector<NamedModel>& models, const std::vector<std::int64_t>& tokens,
                                        std::int64_t front, std::int64_t by) {
  const c10::NoGradGuard evaluation;
  std::vector<ShiftResult> results;
  for (const NamedModel& each : models) {
    const Llama& model = each.adapted.model;
    ShiftDifference added = added_tokens(model, tokens, front, by);
    results.push_back({each.name, std::move(added), shifted_ids(model, tokens, by)});
  }
  return results;
}

Json shift_json(const std::vector<ShiftResult>& results) {
  Json json;
  for (const ShiftResult& each : results) {
    json[each.model] = {{"add tokens", difference_json(each.added)}, {"shift ids", difference_json(each.shifted)}};
  }
  return json;
}

}  // namespace tapetune
