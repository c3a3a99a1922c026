#include "report/chart.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <set>

namespace tapetune {

namespace {

constexpr double letter = 6.5, line_height = 15;  // of 12-pixel text, rounded up
constexpr double bold = 1.12;                     // how much wider bold text is
constexpr double enlarged = 1.4;                  // panel text on a phone, where panels are in pairs
constexpr std::size_t palette = 8;

struct Drawing {
  std::string body;
  double width = 0, height = 0;
};

double text_width(std::string_view text) {
  const auto continues = [](char c) { return (static_cast<unsigned char>(c) & 0xC0) == 0x80; };
  return letter * static_cast<double>(text.size() -
                                      static_cast<std::size_t>(std::count_if(text.begin(), text.end(), continues)));
}

std::string text(double x, double y, std::string_view words, std::string_view classes, std::string_view more = "") {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" class=\"{}\"{}>{}</text>\n", x, y, classes, more, escaped(words));
}

std::string whole_svg(const Drawing& drawing, std::string_view title, std::string_view classes) {
  return fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"chart {}\" viewBox=\"0 0 {:.0f} {:.0f}\" role=\"img\" "
      "aria-label=\"{}\">\n{}</svg>\n",
      classes, drawing.width, drawing.height, escaped(title), drawing.body);
}

std::string number(double value) { return fmt::format("{:.5g}", value); }

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
    body += text(x + 16, y, series.name, "name");
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
    std::string tip = fmt::format("{} {}", chart.x_label, number(shown[i]));
    for (const Series& series : chart.series) {
      const auto at = std::find_if(series.points.begin(), series.points.end(),
                                   [&](const auto& point) { return point.first == shown[i]; });
      if (at != series.points.end()) tip += fmt::format("\n{} {}", series.name, number(at->second));
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
    body += text(left - 7, y(tick) + 4, number(tick), "tick end");
  }
  double free = -1e9;
  for (const double tick : few ? xs : chart.log_x ? log_ticks(xr, 5) : even_ticks(xr, narrow ? 4 : 6)) {
    const std::string words = number(tick);
    if (x(tick) - text_width(words) / 2 < free) continue;
    free = x(tick) + text_width(words) / 2 + 4;
    body += fmt::format("<path class=\"grid\" d=\"M{:.1f} {:.1f}V{:.1f}\"/>\n", x(tick), bottom, bottom + 5);
    body += text(x(tick), bottom + 19, words, "tick middle");
  }
  body += fmt::format("<path class=\"axis\" d=\"M{:.1f} {:.1f}V{:.1f}H{:.1f}\"/>\n", left, top, bottom, right);
  body += text((left + right) / 2, drawing.height - 6, chart.x_label, "axis-name middle");
  body += text(4, top - 9 - line_height * static_cast<double>(chart.landmarks.size()), chart.y_label, "axis-name");

  for (std::size_t i = 0; i < chart.landmarks.size(); ++i) {
    const Landmark& mark = chart.landmarks[i];
    if (mark.x < xr.least || mark.x > xr.most) continue;
    const double at = x(mark.x), up_to = top - line_height * static_cast<double>(chart.landmarks.size() - 1 - i) - 12;
    body += fmt::format("<path class=\"landmark\" d=\"M{:.1f} {:.1f}V{:.1f}\"/>\n", at, bottom, up_to);
    const bool before = at + 5 + text_width(mark.label) > width;
    body += text(before ? at - 5 : at + 5, up_to + 9, mark.label, before ? "small end" : "small");
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
      body += text(right + 20, label.at + 4, series.name, fmt::format("name of{}", series.colour % palette));
    }
  }
  body += bands(chart, xs, x, top, bottom, left, right);
  return drawing;
}

// --- heat maps -------------------------------------------------------------------------------------------------------

struct Colour {
  double red, green, blue;
};

// From dark blue through grey to yellow: perceptually uniform, the same to the colour-blind, and readable in greyscale.
Colour ramp(double share) {
  static constexpr std::array<Colour, 6> stops{
      {{0, 34, 78}, {53, 69, 108}, {102, 105, 112}, {148, 142, 119}, {200, 184, 102}, {254, 232, 56}}};
  const double place = std::clamp(share, 0.0, 1.0) * (stops.size() - 1);
  const auto below = std::min(static_cast<std::size_t>(place), stops.size() - 2);
  const double part = place - static_cast<double>(below);
  const Colour &a = stops[below], &b = stops[below + 1];
  return {a.red + part * (b.red - a.red), a.green + part * (b.green - a.green), a.blue + part * (b.blue - a.blue)};
}

std::string hex(const Colour& c) {
  return fmt::format("#{:02x}{:02x}{:02x}", std::lround(c.red), std::lround(c.green), std::lround(c.blue));
}

double share_of(const HeatMap& map, double value) {
  return map.most > map.least ? (value - map.least) / (map.most - map.least) : 0;
}

std::string shown_value(const HeatMap& map, double value) {
  return map.percent ? fmt::format("{:.0f}%", 100 * value) : fmt::format("{:.3g}", value);
}

Drawing draw_panel(const HeatMap& map, const HeatMap::Panel& panel) {
  constexpr double width = 240, top = 26;
  double widest = 0;
  for (const std::string& row : map.rows) widest = std::max(widest, text_width(row));
  const double left = 32 + enlarged * widest, columns = static_cast<double>(map.columns.size()),
               rows = static_cast<double>(map.rows.size());
  const double cell = (width - 6 - left) / columns, tall = map.percent ? 24 : cell, bottom = top + tall * rows;
  Drawing drawing{"", width, bottom + 44};
  std::string& body = drawing.body;
  body += text(left, 14, panel.title, "name");
  double widest_column = 0;
  for (const std::string& column : map.columns) widest_column = std::max(widest_column, text_width(column));
  const auto every = [](double needed, double there) {
    return static_cast<std::size_t>(std::max(1.0, std::ceil(needed / there)));
  };
  const std::size_t row_step = every(enlarged * line_height, tall),
                    column_step = every(enlarged * widest_column + 8, cell);
  for (std::size_t r = 0; r < map.rows.size(); ++r) {
    const double y = top + tall * static_cast<double>(r);
    if (r % row_step == 0) body += text(left - 4, y + tall / 2 + 4, map.rows[r], "tick end");
    for (std::size_t c = 0; c < map.columns.size(); ++c) {
      const double value = panel.rows[r][c];
      if (!std::isfinite(value)) continue;
      // Edges are rounded alike, so that neighbours touch.
      const auto edge = [&](std::size_t column) {
        return std::round(10 * (left + cell * static_cast<double>(column))) / 10;
      };
      const double x = edge(c);
      body += fmt::format(
          "<rect class=\"cell\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" fill=\"{}\"><title>{} {}, "
          "{} {}: {}</title></rect>\n",
          x, y, edge(c + 1) - x, tall, hex(ramp(share_of(map, value))), escaped(map.y_label), escaped(map.rows[r]),
          escaped(map.x_label), escaped(map.columns[c]), shown_value(map, value));
      const std::string words = fmt::format("{:.0f}", 100 * value);
      if (map.percent && enlarged * text_width(words) < cell) {
        body += text(x + cell / 2, y + tall / 2 + 4, words,
                     share_of(map, value) > 0.55 ? "value middle on-light" : "value middle on-dark");
      }
    }
  }
  for (std::size_t c = 0; c < map.columns.size(); c += column_step) {
    body += text(left + cell * (static_cast<double>(c) + 0.5), bottom + 17, map.columns[c], "tick middle");
  }
  body += text((left + width - 6) / 2, bottom + 37, map.x_label, "axis-name middle");
  const double middle = (top + bottom) / 2;
  body +=
      text(16, middle, map.y_label, "axis-name middle", fmt::format(" transform=\"rotate(-90 16 {:.1f})\"", middle));
  return drawing;
}

Drawing draw_scale(const HeatMap& map) {
  constexpr int steps = 40;
  constexpr double bar = 160, height = 10;
  Drawing drawing;
  const std::string least = shown_value(map, map.least), most = shown_value(map, map.most);
  const double left = text_width(least) + 14;  // a percent sign is wider than most letters
  drawing.body += text(left - 6, 14, least, "tick end");
  for (int i = 0; i < steps; ++i) {
    drawing.body += fmt::format("<rect x=\"{:.1f}\" y=\"5\" width=\"{:.1f}\" height=\"{:.0f}\" fill=\"{}\"/>\n",
                                left + bar * i / steps, bar / steps + 0.5, height, hex(ramp((i + 0.5) / steps)));
  }
  drawing.body += text(left + bar + 6, 14, most, "tick");
  drawing.body += text(left + bar + 20 + text_width(most), 14, map.value_label, "axis-name");
  drawing.width = left + bar + 28 + text_width(most) + text_width(map.value_label);
  drawing.height = 20;
  return drawing;
}

std::string placed(const Drawing& drawing, double x, double y) {
  return fmt::format("<g transform=\"translate({:.1f} {:.1f})\">\n{}</g>\n", x, y, drawing.body);
}

}  // namespace

std::string svg(const LineChart& chart, int width) {
  return whole_svg(draw(chart, width), chart.title, width < 600 ? "narrow" : "wide");
}

std::string svg(const HeatMap& map, int width) {
  constexpr double gap = 12;
  Drawing all{"", static_cast<double>(width), 0};
  double x = 0, row = 0;
  for (const HeatMap::Panel& panel : map.panels) {
    const Drawing one = draw_panel(map, panel);
    if (x > 0 && x + one.width > all.width) {
      x = 0;
      all.height += row + gap;
    }
    all.body += placed(one, x, all.height);
    x += one.width + gap;
    row = one.height;
  }
  all.height += row + gap;
  const Drawing scale = draw_scale(map);
  all.body += placed(scale, 0, all.height);
  all.height += scale.height;
  return whole_svg(all, map.title, "wide");
}

std::string panel_svg(const HeatMap& map, std::size_t panel) {
  return whole_svg(draw_panel(map, map.panels[panel]), fmt::format("{}: {}", map.title, map.panels[panel].title),
                   "panel");
}

std::string scale_svg(const HeatMap& map) {
  const Drawing drawing = draw_scale(map);
  std::string text = whole_svg(drawing, "scale of " + map.value_label, "scale");
  return text.insert(4, fmt::format(" width=\"{:.0f}\"", drawing.width));
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

std::string csv(const HeatMap& map) {
  std::string text =
      fmt::format("panel,{},{},{}\n", csv_field(map.y_column), csv_field(map.x_column), csv_field(map.value_column));
  for (const HeatMap::Panel& panel : map.panels) {
    for (std::size_t r = 0; r < map.rows.size(); ++r) {
      for (std::size_t c = 0; c < map.columns.size(); ++c) {
        if (!std::isfinite(panel.rows[r][c])) continue;
        text += fmt::format("{},{},{},{}\n", csv_field(panel.title), csv_field(map.rows[r]), csv_field(map.columns[c]),
                            panel.rows[r][c]);
      }
    }
  }
  return text;
}

// Okabe and Ito's colours, darker on a light page and lighter on a dark one.
std::string chart_style() {
  constexpr std::array<std::string_view, palette> light{"#6b7280", "#0067a8", "#c24e00", "#00795a",
                                                        "#a8467f", "#8a6100", "#2b7fb8", "#5b4b9a"},
      dark{"#9aa3af", "#5cb8f0", "#ff9a55", "#3fd0a4", "#ec9ccb", "#f0c04c", "#9ad4f7", "#b7a8f5"};
  const auto variables = [](const auto& colours, std::string_view rest) {
    std::string text{rest};
    for (std::size_t i = 0; i < colours.size(); ++i) text += fmt::format("--c{}:{};", i, colours[i]);
    return text;
  };
  const std::string day = variables(light, "--ink:#1b1f24;--soft:#57606a;--rule:#dfe3e8;--paper:#ffffff;");
  std::string style = fmt::format(
      ":root{{color-scheme:light dark;{}}}\n@media (prefers-color-scheme:dark){{:root{{{}}}}}\n@media "
      "print{{:root{{{}}}}}\n",
      day, variables(dark, "--ink:#e8eaed;--soft:#a4adb8;--rule:#363c45;--paper:#14171b;"), day);
  style +=
      ".chart text{font:12px system-ui,'Segoe UI',Roboto,'Helvetica Neue',sans-serif;fill:var(--ink)}\n"
      ".chart .tick,.chart .small{fill:var(--soft)}.chart .small{font-size:11px;"
      "paint-order:stroke;stroke:var(--paper);stroke-width:4px}\n"
      ".chart .axis-name{fill:var(--soft);font-size:12px}.chart .name{font-weight:600}\n"
      ".chart .end{text-anchor:end}.chart .middle{text-anchor:middle}\n"
      ".chart .grid{stroke:var(--rule);fill:none}.chart .axis{stroke:var(--soft);fill:none}\n"
      ".chart .landmark{stroke:var(--soft);stroke-dasharray:3 4;fill:none}\n"
      ".chart .line{fill:none;stroke-width:2.2;stroke-linejoin:round}\n"
      ".chart .raw{fill:none;stroke-width:1;opacity:.28}.chart .leader{fill:none;opacity:.6}\n"
      ".chart .dot{stroke-width:1.6}.chart .band{fill:transparent}\n"
      ".chart .cell{shape-rendering:crispEdges}.chart .on-light{fill:#111}.chart .on-dark{fill:#fff}\n";
  for (std::size_t i = 0; i < palette; ++i) {
    style += fmt::format(
        ".chart .s{0}{{stroke:var(--c{0})}}.chart .dot.s{0}{{fill:var(--c{0})}}.chart .of{0}{{fill:var(--c{0})}}\n", i);
  }
  return style;
}

std::string svg_file(const std::string& svg) {
  const std::size_t after = svg.find(">\n") + 2;
  return fmt::format("{}<style>{}svg{{background:var(--paper)}}</style>\n{}", svg.substr(0, after), chart_style(),
                     svg.substr(after));
}

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\n':
        out += "&#10;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

std::string csv_field(std::string_view text) {
  if (text.find_first_of(",\"\n") == std::string_view::npos) return std::string(text);
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"') out += '"';
    out += c;
  }
  return out + "\"";
}

}  // namespace tapetune
