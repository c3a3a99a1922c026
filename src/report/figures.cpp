#include "report/figures.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>

namespace tapetune {

namespace {

// Single steps are noisy; a mean over a few of them shows where they go.
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

// As many as a chart has room for, the last among them.
Points thinned(const Points& points, std::size_t most) {
  const std::size_t stride = (points.size() + most - 1) / most;
  if (stride <= 1) return points;
  Points kept;
  for (std::size_t i = (points.size() - 1) % stride; i < points.size(); i += stride) kept.push_back(points[i]);
  return kept;
}

// A few of those whose positions differ from RoPE's, which the first layer reads: the updates show from the second on.
std::vector<std::size_t> pictured_layers(const Entry& entry) {
  constexpr std::size_t most = 5;
  const std::size_t layers = entry.layers.size(), shown = std::min(layers - 1, most);
  std::vector<std::size_t> chosen;
  for (std::size_t i = 0; i < shown; ++i) {
    chosen.push_back(shown == 1 ? layers - 1 : 1 + i * (layers - 2) / (shown - 1));
  }
  return chosen;
}

HeatMap pairs_of_tokens(const Comparison& c) {
  HeatMap map;
  map.x_label = "token";
  map.y_label = "token";
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
        value = NAN;  // no token sees later ones
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
  chart.y_label = chart.log_y ? "perplexity (logarithmic)" : "perplexity";
  const std::int64_t own = c.base_config.longest_context();
  chart.landmarks.push_back({static_cast<double>(own), fmt::format("base model's context, {}", own)});
  if (own != c.trained_context) {
    chart.landmarks.push_back({static_cast<double>(c.trained_context), fmt::format("trained, {}", c.trained_context)});
  }
  return chart;
}

LineChart loss_chart(const Comparison& c) {
  LineChart chart;
  chart.name = "loss";
  chart.title = "Training loss";
  chart.x_label = "step";
  chart.y_label = "loss, a running mean";
  chart.dots = false;
  for (const Entry& entry : c.entries) {
    if (entry.losses.empty()) continue;
    Points points;
    for (const StepLoss& each : entry.losses) points.emplace_back(static_cast<double>(each.step), each.loss);
    Series series{entry.name, colour_of(c, entry), thinned(running_mean(points, points.size() / 40), 240), points};
    chart.series.push_back(std::move(series));
  }
  return chart;
}

LineChart distance_chart(const Comparison& c) {
  LineChart chart;
  chart.name = "attention-distance";
  chart.title = "Attention distance by layer";
  chart.x_label = "layer";
  chart.y_label = "tokens back, the mean over heads";
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
  map.y_label = "depth";
  map.value_label = "found";
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
  for (const double depth : depths) map.rows.push_back(fmt::format("{:.0f}%", 100 * depth));
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
  add_panel(map, "RoPE, all layers", entry.layers[0].position);
  for (const std::size_t layer : pictured_layers(entry)) {
    add_panel(map, fmt::format("{}, layer {}", entry.name, layer + 1), entry.layers[layer].position);
  }
  return map;
}

HeatMap position_change_map(const Comparison& c, const Entry& entry) {
  HeatMap map = pairs_of_tokens(c);
  map.name = "position-changes-" + entry.name;
  map.title = fmt::format("Change of the dot products of position states, {}", entry.name);
  map.value_label = "dot product less RoPE's";
  for (const std::size_t layer : pictured_layers(entry)) {
    std::vector<std::vector<double>> change = entry.layers[layer].position;
    for (std::size_t r = 0; r < change.size(); ++r) {
      for (std::size_t k = 0; k < change[r].size(); ++k) change[r][k] -= entry.layers[0].position[r][k];
    }
    add_panel(map, fmt::format("layer {} less RoPE", layer + 1), std::move(change));
  }
  return map;
}

}  // namespace tapetune
