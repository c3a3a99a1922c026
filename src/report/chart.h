// Charts as SVG, with their numbers as CSV. Drawn here, so that a report needs neither a script nor a network to be
// read; colours are CSS variables of `chart_style`, which follow the reader's scheme and turn to ink in print.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tapetune {

using Points = std::vector<std::pair<double, double>>;  // by rising x

struct Series {
  std::string name;
  std::size_t colour = 0;  // 0 is grey, for what the others are measured against
  Points points;
  Points behind;  // drawn faintly behind them: what they are a mean of
};

// A vertical line with a word on it.
struct Landmark {
  double x = 0;
  std::string label;
};

struct LineChart {
  std::string name;  // of its files
  std::string title, x_label, y_label;
  std::vector<Series> series;
  std::vector<Landmark> landmarks;
  bool log_x = false, log_y = false;
  bool dots = true;  // a mark at each point
};

// Panels over the same rows and columns, with one scale of colours.
struct HeatMap {
  struct Panel {
    std::string title;
    std::vector<std::vector<double>> rows;  // from the top; not a number: an empty cell
  };
  std::string name;
  std::string title, x_label, y_label, value_label;
  std::vector<std::string> columns, rows;
  std::vector<Panel> panels;
  double least = 0, most = 1;
  bool percent = false;  // values stand in their cells
};

// Widths in pixels at which text is as large as that of the page around it.
constexpr int wide_chart = 760, narrow_chart = 344;

std::string svg(const LineChart& chart, int width = wide_chart);
std::string svg(const HeatMap& map, int width = wide_chart);
// One panel, and the scale that all of them share: for a page that breaks lines between them.
std::string panel_svg(const HeatMap& map, std::size_t panel);
std::string scale_svg(const HeatMap& map);

std::string csv(const LineChart& chart);
std::string csv(const HeatMap& map);

// The CSS that the charts need, for the page around them.
std::string chart_style();
// A chart as a file of its own.
std::string svg_file(const std::string& svg);

std::string escaped(std::string_view text);    // for HTML and SVG
std::string csv_field(std::string_view text);  // quoted where it must be

}  // namespace tapetune
