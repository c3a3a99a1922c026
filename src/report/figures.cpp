#include "report/figures.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>

namespace tapetune {

namespace {

// Single steps are noisy; a mean over neighbouring steps shows the trend.
Points running_mean(const Points& points, std::size_t reach) {
  Points mean;
  for (std::size_t i = 0; i < points.size(); ++i) {
    const std::size_t begin = i > reach ? i - reach : 0, end = std::min(points.size(), i + reach + 1);
    double sum = 0;
    for (std::size_t j = begin; j < end; ++j) sum += points[j].second;
    mean.emplace_back(points[i].first, sum / static_cast<double>(end - begin));
  }
  return mean;
}

// A few of the layers from the second on: the first reads RoPE's positions, before any update.
std::vector<std::size_t> pictured_layers(const Entry& entry) {
  constexpr std::size_t most = 5;
  const std::size_t layers = entry.layers.size(), shown = std::min(layers - 1, most);
  std::vector<std::size_t> chosen;
  chosen.reserve(shown);
  for (std::size_t i = 0; i < shown; ++i) {
    chosen.push_back(shown == 1 ? layers - 1 : 1 + i * (layers - 2) / (shown - 1));
  }
  return chosen;
}

HeatMap pairs_of_tokens(const Comparison& c) {
  HeatMap map;
  map.x_label = "key token";
  map.y_label = "query token";
  map.x_column = "key_token";
  map.y_column = "query_token";
  for (const std::int64_t token : c.pictured) map.columns.push_back(fmt::format("{}", token));
  map.rows = map.columns;
  map.least = INFINITY;
  map.most = -INFINITY;
  return map;
}

void add_panel(HeatMap& map, std::string title, std::vector<std::vector<double>> rows) {
  for (std::size_t r = 0; r < rows.size(); ++r) {
    for (std::size_t k = 0; k < rows[r].size(); ++k) {
      double& value = rows[r][k];
      if (k > r) {
        value = NAN;  // causal: no query sees later keys
        continue;
      }
      map.least = std::min(map.least, value);
      map.most = std::max(map.most, value);
    }
  }
  map.panels.push_back({std::move(title), std::move(rows)});
}

}  // namespace

std::size_t colour_of(const Comparison& comparison, const Entry& entry) {
  return static_cast<std::size_t>(&entry - comparison.entries.data());
}

LineChart perplexity_chart(const Comparison& c, std::size_t text) {
  LineChart chart;
  chart.name = c.texts.size() == 1 ? "perplexity" : fmt::format("perplexity-{}", text + 1);
  chart.title = "Perplexity against context: " + c.texts[text].name;
  chart.x_label = "context (tokens)";
  chart.x_column = "context";
  chart.y_column = "perplexity";
  chart.log_x = true;
  double least = INFINITY, most = 0;
  for (const Entry& entry : c.entries) {
    Series series{entry.name, colour_of(c, entry), {}, {}};
    for (const ContextPerplexity& row : entry.perplexity[text]) {
      series.points.emplace_back(static_cast<double>(row.context), row.perplexity);
      least = std::min(least, row.perplexity);
      most = std::max(most, row.perplexity);
    }
    chart.series.push_back(std::move(series));
  }
  chart.log_y = most > 3 * least;
  chart.y_label = chart.log_y ? "perplexity (log scale)" : "perplexity";
  const std::int64_t own = c.base_config.longest_context();
  chart.landmarks.push_back({static_cast<double>(own), fmt::format("base model's context, {}", own)});
  if (own != c.trained_context) {
    chart.landmarks.push_back(
        {static_cast<double>(c.trained_context), fmt::format("training context, {}", c.trained_context)});
  }
  return chart;
}

LineChart loss_chart(const Comparison& c) {
  LineChart chart;
  chart.name = "loss";
  chart.title = "Training loss";
  chart.x_label = "step";
  chart.y_label = "loss (running mean)";
  chart.x_column = "step";
  chart.raw_column = "loss";
  chart.y_column = "running_mean";
  chart.dots = false;
  for (const Entry& entry : c.entries) {
    if (entry.losses.empty()) continue;
    Points points;
    for (const StepLoss& each : entry.losses) points.emplace_back(static_cast<double>(each.step), each.loss);
    Series series{entry.name, colour_of(c, entry), running_mean(points, points.size() / 40), points};
    chart.series.push_back(std::move(series));
  }
  return chart;
}

LineChart distance_chart(const Comparison& c) {
  LineChart chart;
  chart.name = "attention-distance";
  chart.title = "Attention distance by layer";
  chart.x_label = "layer";
  chart.y_label = "mean attention distance (tokens)";
  chart.x_column = "layer";
  chart.y_column = "attention_distance";
  for (const Entry& entry : c.entries) {
    Series series{entry.name, colour_of(c, entry), {}, {}};
    for (std::size_t i = 0; i < entry.layers.size(); ++i) {
      series.points.emplace_back(static_cast<double>(i + 1), entry.layers[i].distance);
    }
    chart.series.push_back(std::move(series));
  }
  return chart;
}

HeatMap passkey_map(const Comparison& c) {
  HeatMap map;
  map.name = "passkey";
  map.title = "Passkey retrieval";
  map.x_label = "context (tokens)";
  map.y_label = "depth (%)";
  map.value_label = "accuracy";
  map.x_column = "context";
  map.y_column = "depth_percent";
  map.value_column = "accuracy";
  map.percent = true;
  std::set<std::int64_t> contexts;
  std::set<double> depths;
  for (const Entry& entry : c.entries) {
    for (const RetrievalCell& cell : entry.passkey) {
      contexts.insert(cell.context);
      depths.insert(cell.depth);
    }
  }
  for (const std::int64_t context : contexts) map.columns.push_back(fmt::format("{}", context));
  for (const double depth : depths) map.rows.push_back(fmt::format("{:g}", std::round(1000 * depth) / 10));
  for (const Entry& entry : c.entries) {
    if (entry.passkey.empty()) continue;
    HeatMap::Panel panel{entry.name, {depths.size(), std::vector<double>(contexts.size(), NAN)}};
    for (const RetrievalCell& cell : entry.passkey) {
      const auto row = static_cast<std::size_t>(std::distance(depths.begin(), depths.find(cell.depth)));
      const auto column = static_cast<std::size_t>(std::distance(contexts.begin(), contexts.find(cell.context)));
      panel.rows[row][column] = cell.accuracy;
    }
    map.panels.push_back(std::move(panel));
  }
  return map;
}

HeatMap position_map(const Comparison& c, const Entry& entry) {
  HeatMap map = pairs_of_tokens(c);
  map.name = "positions-" + entry.name;
  map.title = fmt::format("Dot products of position states, {}", entry.name);
  map.value_label = "dot product";
  map.value_column = "dot_product";
  add_panel(map, "RoPE, all layers", entry.layers[0].position);
  for (const std::size_t layer : pictured_layers(entry)) {
    add_panel(map, fmt::format("{}, layer {}", entry.name, layer + 1), entry.layers[layer].position);
  }
  return map;
}

HeatMap position_change_map(const Comparison& c, const Entry& entry) {
  HeatMap map = pairs_of_tokens(c);
  map.name = "position-changes-" + entry.name;
  map.title = fmt::format("Change in dot products of position states, {}", entry.name);
  map.value_label = "difference from RoPE";
  map.value_column = "difference_from_rope";
  for (const std::size_t layer : pictured_layers(entry)) {
    std::vector<std::vector<double>> change = entry.layers[layer].position;
    for (std::size_t r = 0; r < change.size(); ++r) {
      for (std::size_t k = 0; k < change[r].size(); ++k) change[r][k] -= entry.layers[0].position[r][k];
    }
    add_panel(map, fmt::format("layer {} − RoPE", layer + 1), std::move(change));
  }
  return map;
}

}  // namespace tapetune
