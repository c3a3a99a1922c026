#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <set>

#include "report/chart.h"
#include "report/svg.h"

namespace tapetune {

namespace {

constexpr double bold = 1.12;  // how much wider bold text is

// --- scales ----------------------------------------------------------------------------------------------------------

class Scale {
 public:
  Scale(double least, double most, double from, double to, bool log) : from_(from), to_(to), log_(log) {
    least_ = place(least);
    most_ = std::max(place(most), least_ + 1e-12);
  }
  double operator()(double value) const { return from_ + (place(value) - least_) / (most_ - least_) * (to_ - from_); }

 private:
  double place(double value) const { return log_ ? std::log(std::max(value, 1e-300)) : value; }
  double from_, to_, least_ = 0, most_ = 1;
  bool log_;
};

struct Range {
  double least = std::numeric_limits<double>::infinity(), most = -std::numeric_limits<double>::infinity();
  void include(double value) {
    least = std::min(least, value);
    most = std::max(most, value);
  }
  bool empty() const { return least > most; }
};

// Adds a margin, also where all values are equal.
Range padded(Range range, bool log) {
  if (range.empty()) return {log ? 1.0 : 0.0, log ? 10.0 : 1.0};
  if (log) {
    const double by = std::max(std::pow(range.most / range.least, 0.06), 1.02);
    return {range.least / by, range.most * by};
  }
  const double by = std::max((range.most - range.least) * 0.06, std::abs(range.most) * 1e-3 + 1e-9);
  return {range.least - by, range.most + by};
}

std::vector<double> even_ticks(const Range& range, int about) {
  const double rough = (range.most - range.least) / about, power = std::pow(10, std::floor(std::log10(rough)));
  const double share = rough / power, step = power * (share > 5 ? 10 : share > 2 ? 5 : share > 1 ? 2 : 1);
  std::vector<double> ticks;
  for (double tick = std::ceil(range.least / step) * step; tick <= range.most + step * 1e-9; tick += step) {
    ticks.push_back(std::abs(tick) < step * 1e-9 ? 0 : tick);
  }
  return ticks;
}

std::vector<double> log_ticks(const Range& range, int about) {
  std::vector<double> ticks;
  for (double power = std::pow(10, std::floor(std::log10(range.least))); power <= range.most; power *= 10) {
    for (const double digit : {1.0, 2.0, 5.0}) {
      if (digit * power >= range.least && digit * power <= range.most) ticks.push_back(digit * power);
    }
  }
  if (ticks.size() < 3) return even_ticks(range, about);
  if (ticks.size() > static_cast<std::size_t>(2 * about)) {  // whole decades are enough
    std::erase_if(ticks, [](double t) { return std::abs(std::log10(t) - std::round(std::log10(t))) > 1e-9; });
  }
  return ticks;
}

// --- lines -----------------------------------------------------------------------------------------------------------

// Shapes tell series apart without colours.
std::string dot(double x, double y, std::size_t colour) {
  static constexpr std::array<std::string_view, palette> shapes{
      "m-4 0h8m-4 -4v8",                               // a cross
      "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z",           // a circle
      "m-3.5 -3.5h7v7h-7z",                            // a square
      "m0 -4.5l4.3 7.6h-8.6z",                         // a triangle
      "m0 -5l4.4 5l-4.4 5l-4.4 -5z",                   // a diamond
      "m0 4.5l4.3 -7.6h-8.6z",                         // a triangle upside down
      "m-4.5 -2h3v-2.5h3v2.5h3v4h-3v2.5h-3v-2.5h-3z",  // a thick cross
      "m-4.5 -2.5h9v5h-9z"};                           // a bar
  return fmt::format("<path class=\"dot s{}\" d=\"M{:.1f} {:.1f}{}\"/>\n", colour % palette, x, y,
                     shapes[colour % palette]);
}

std::string polyline(const Points& points, const Scale& x, const Scale& y) {
  std::string path;
  for (const auto& [at, value] : points) {
    path += fmt::format("{}{:.1f} {:.1f}", path.empty() ? "M" : "L", x(at), y(value));
  }
  return path;
}

// At most so many points, the last among them.
Points thinned(const Points& points, std::size_t most) {
  const std::size_t stride = (points.size() + most - 1) / most;
  if (stride <= 1) return points;
  Points kept;
  for (std::size_t i = (points.size() - 1) % stride; i < points.size(); i += stride) kept.push_back(points[i]);
  return kept;
}

struct Label {
  std::size_t series;
  double point, at;  // where its line ends, and where the label is
};

// Places labels as near to their lines as possible without overlaps.
void spread(std::vector<Label>& labels, double top, double bottom) {
  std::stable_sort(labels.begin(), labels.end(), [](const Label& a, const Label& b) { return a.point < b.point; });
  double least = top;
  for (Label& label : labels) {
    label.at = std::max(label.point, least);
    least = label.at + line_height;
  }
  double most = bottom;
  for (auto label = labels.rbegin(); label != labels.rend(); ++label) {
    label->at = std::min(label->at, most);
    most = label->at - line_height;
  }
}

// Names in rows above the plot, for narrow charts; returns their height.
double legend(const LineChart& chart, double width, std::string& body) {
  double x = 6, y = 12;
  for (const Series& series : chart.series) {
    const double needed = 20 + bold * text_width(series.name) + 10;
    if (x > 6 && x + needed > width) {
      x = 6;
      y += line_height + 3;
    }
    body += dot(x + 6, y - 4, series.colour);
    body += svg_text(x + 16, y, series.name, "name");
    x += needed;
  }
  return y + 8;
}

std::vector<double> all_x(const LineChart& chart) {
  std::set<double> found;
  for (const Series& series : chart.series) {
    for (const auto& [x, y] : series.points) found.insert(x);
  }
  return {found.begin(), found.end()};
}

// Bands over the whole height, each with the values nearest to it: they show wherever the pointer is.
std::string bands(const LineChart& chart, const std::vector<double>& xs, const Scale& x, double top, double bottom,
                  double left, double right) {
  constexpr std::size_t most = 80;
  const std::size_t stride = (xs.size() + most - 1) / most;
  std::vector<double> shown;
  for (std::size_t i = 0; i < xs.size(); i += std::max<std::size_t>(1, stride)) shown.push_back(xs[i]);
  std::string body;
  for (std::size_t i = 0; i < shown.size(); ++i) {
    const double begin = i == 0 ? left : (x(shown[i - 1]) + x(shown[i])) / 2;
    const double end = i + 1 == shown.size() ? right : (x(shown[i]) + x(shown[i + 1])) / 2;
    std::string tip = fmt::format("{} {}", chart.x_label, shown_number(shown[i]));
    for (const Series& series : chart.series) {
      const auto at = std::find_if(series.points.begin(), series.points.end(),
                                   [&](const auto& point) { return point.first == shown[i]; });
      if (at != series.points.end()) tip += fmt::format("\n{} {}", series.name, shown_number(at->second));
    }
    body += fmt::format(
        "<rect class=\"band\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" data-x=\"{:.1f}\"><title>{}"
        "</title></rect>\n",
        begin, top, std::max(0.0, end - begin), bottom - top, x(shown[i]), escaped(tip));
  }
  return body;
}

Drawing draw(const LineChart& chart, double width) {
  const bool narrow = width < 600;
  Drawing drawing{"", width, narrow ? 280.0 : 360.0};
  std::string& body = drawing.body;
  double widest = 0;
  for (const Series& series : chart.series) widest = std::max(widest, bold * text_width(series.name));
  const double legend_height = narrow ? legend(chart, width, body) : 0;
  drawing.height += legend_height;
  const double left = narrow ? 46 : 58, right = width - (narrow ? 12 : 30 + widest);
  const double top = legend_height + 22 + line_height * static_cast<double>(chart.landmarks.size()),
               bottom = drawing.height - 44;

  Range over, up;
  const std::vector<double> xs = all_x(chart);
  for (const double x : xs) over.include(x);
  for (const Series& series : chart.series) {
    for (const Points* points : {&series.points, &series.raw}) {
      for (const auto& [x, y] : *points) up.include(y);
    }
  }
  const bool few = xs.size() <= 8;
  const Range xr = few ? padded(over, chart.log_x) : over.empty() ? Range{0, 1} : over, yr = padded(up, chart.log_y);
  const Scale x(xr.least, xr.most, left, right, chart.log_x), y(yr.least, yr.most, bottom, top, chart.log_y);

  for (const double tick : chart.log_y ? log_ticks(yr, 5) : even_ticks(yr, 5)) {
    body += fmt::format("<path class=\"grid\" d=\"M{:.1f} {:.1f}H{:.1f}\"/>\n", left, y(tick), right);
    body += svg_text(left - 7, y(tick) + 4, shown_number(tick), "tick end");
  }
  double free = -1e9;
  for (const double tick : few ? xs : chart.log_x ? log_ticks(xr, 5) : even_ticks(xr, narrow ? 4 : 6)) {
    const std::string words = shown_number(tick);
    if (x(tick) - text_width(words) / 2 < free) continue;
    free = x(tick) + text_width(words) / 2 + 4;
    body += fmt::format("<path class=\"grid\" d=\"M{:.1f} {:.1f}V{:.1f}\"/>\n", x(tick), bottom, bottom + 5);
    body += svg_text(x(tick), bottom + 19, words, "tick middle");
  }
  body += fmt::format("<path class=\"axis\" d=\"M{:.1f} {:.1f}V{:.1f}H{:.1f}\"/>\n", left, top, bottom, right);
  body += svg_text((left + right) / 2, drawing.height - 6, chart.x_label, "axis-name middle");
  body += svg_text(4, top - 9 - line_height * static_cast<double>(chart.landmarks.size()), chart.y_label, "axis-name");

  for (std::size_t i = 0; i < chart.landmarks.size(); ++i) {
    const Landmark& mark = chart.landmarks[i];
    if (mark.x < xr.least || mark.x > xr.most) continue;
    const double at = x(mark.x), up_to = top - line_height * static_cast<double>(chart.landmarks.size() - 1 - i) - 12;
    body += fmt::format("<path class=\"landmark\" d=\"M{:.1f} {:.1f}V{:.1f}\"/>\n", at, bottom, up_to);
    const bool before = at + 5 + text_width(mark.label) > width;
    body += svg_text(before ? at - 5 : at + 5, up_to + 9, mark.label, before ? "small end" : "small");
  }
  for (const Series& series : chart.series) {
    if (series.raw.empty()) continue;
    body += fmt::format("<path class=\"raw s{}\" d=\"{}\"/>\n", series.colour % palette, polyline(series.raw, x, y));
  }
  std::vector<Label> labels;
  for (std::size_t i = 0; i < chart.series.size(); ++i) {
    const Series& series = chart.series[i];
    if (series.points.empty()) continue;
    const Points shown = chart.dots ? series.points : thinned(series.points, 240);
    body += fmt::format("<path class=\"line s{}\" d=\"{}\"/>\n", series.colour % palette, polyline(shown, x, y));
    if (chart.dots) {
      for (const auto& [at, value] : series.points) body += dot(x(at), y(value), series.colour);
    }
    labels.push_back({i, y(series.points.back().second), 0});
  }
  if (!narrow) {
    spread(labels, top, bottom);
    for (const Label& label : labels) {
      const Series& series = chart.series[label.series];
      body += fmt::format("<path class=\"leader s{}\" d=\"M{:.1f} {:.1f}L{:.1f} {:.1f}\"/>\n", series.colour % palette,
                          x(series.points.back().first) + 6, label.point, right + 16, label.at);
      body += svg_text(right + 20, label.at + 4, series.name, fmt::format("name of{}", series.colour % palette));
    }
  }
  body += bands(chart, xs, x, top, bottom, left, right);
  return drawing;
}

}  // namespace

std::string svg(const LineChart& chart, int width) {
  return whole_svg(draw(chart, width), chart.title, width < 600 ? "narrow" : "wide");
}

std::string csv(const LineChart& chart) {
  const bool raw = !chart.raw_column.empty();
  std::string text = fmt::format("series,{},{}{}\n", csv_field(chart.x_column),
                                 raw ? csv_field(chart.raw_column) + "," : "", csv_field(chart.y_column));
  for (const Series& series : chart.series) {
    for (std::size_t i = 0; i < series.points.size(); ++i) {
      const auto& [x, y] = series.points[i];
      text += fmt::format("{},{},{}{}\n", csv_field(series.name), x,
                          raw ? fmt::format("{},", series.raw.at(i).second) : "", y);
    }
  }
  return text;
}

}  // namespace tapetune
