// Charts as SVG, with their numbers as CSV. They are drawn here, so that a report needs neither a script nor a network;
// colours are CSS variables of `chart_style`, which follow the reader's colour scheme.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tapetune {

using Points = std::vector<std::pair<double, double>>;  // in ascending order of x

struct Series {
  std::string name;
  std::size_t colour = 0;  // 0 is grey, for the baseline
  Points points;
  Points raw;  // drawn faintly behind `points`, which are a running mean of them, with the same x
};

// A vertical line with a label.
struct Landmark {
  double x = 0;
  std::string label;
};

struct LineChart {
  std::string name;  // of its files
  std::string title, x_label, y_label;
  std::string x_column, y_column, raw_column;  // of the CSV file; raw_column where series have raw values
  std::vector<Series> series;
  std::vector<Landmark> landmarks;
  bool log_x = false, log_y = false;
  bool dots = true;  // a marker at each point
};

// Panels over the same rows and columns, with one colour scale.
struct HeatMap {
  struct Panel {
    std::string title;
    std::vector<std::vector<double>> rows;  // from the top; NaN: an empty cell
  };
  std::string name;
  std::string title, x_label, y_label, value_label;
  std::string x_column, y_column, value_column;  // of the CSV file
  std::vector<std::string> columns, rows;
  std::vector<Panel> panels;
  double least = 0, most = 1;
  bool percent = false;  // values are shown in their cells, in percent
};

// Widths in pixels at which a chart's text is as large as that of the page around it.
constexpr int wide_chart = 760, narrow_chart = 344;

std::string svg(const LineChart& chart, int width = wide_chart);
std::string svg(const HeatMap& map, int width = wide_chart);
// One panel, and the colour scale that all of them share, for a page that wraps panels.
std::string panel_svg(const HeatMap& map, std::size_t panel);
std::string scale_svg(const HeatMap& map);

std::string csv(const LineChart& chart);
std::string csv(const HeatMap& map);

// The CSS of the charts, for the page around them.
std::string chart_style();
// A chart as a standalone file.
std::string svg_file(const std::string& svg);

std::string escaped(std::string_view text);    // for HTML and SVG
std::string csv_field(std::string_view text);  // quoted where it must be

}  // namespace tapetune
