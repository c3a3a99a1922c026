#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "report/chart.h"
#include "report/svg.h"

namespace tapetune {

namespace {

constexpr double enlarged = 1.4;  // panel text on a phone, where panels are in pairs

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
  body += svg_text(left, 14, panel.title, "name");
  double widest_column = 0;
  for (const std::string& column : map.columns) widest_column = std::max(widest_column, text_width(column));
  const auto every = [](double needed, double there) {
    return static_cast<std::size_t>(std::max(1.0, std::ceil(needed / there)));
  };
  const std::size_t row_step = every(enlarged * line_height, tall),
                    column_step = every(enlarged * widest_column + 8, cell);
  for (std::size_t r = 0; r < map.rows.size(); ++r) {
    const double y = top + tall * static_cast<double>(r);
    if (r % row_step == 0) body += svg_text(left - 4, y + tall / 2 + 4, map.rows[r], "tick end");
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
        body += svg_text(x + cell / 2, y + tall / 2 + 4, words,
                         share_of(map, value) > 0.55 ? "value middle on-light" : "value middle on-dark");
      }
    }
  }
  for (std::size_t c = 0; c < map.columns.size(); c += column_step) {
    body += svg_text(left + cell * (static_cast<double>(c) + 0.5), bottom + 17, map.columns[c], "tick middle");
  }
  body += svg_text((left + width - 6) / 2, bottom + 37, map.x_label, "axis-name middle");
  const double middle = (top + bottom) / 2;
  body += svg_text(16, middle, map.y_label, "axis-name middle",
                   fmt::format(" transform=\"rotate(-90 16 {:.1f})\"", middle));
  return drawing;
}

Drawing draw_scale(const HeatMap& map) {
  constexpr int steps = 40;
  constexpr double bar = 160, height = 10;
  Drawing drawing;
  const std::string least = shown_value(map, map.least), most = shown_value(map, map.most);
  const double left = text_width(least) + 14;  // a percent sign is wider than most letters
  drawing.body += svg_text(left - 6, 14, least, "tick end");
  for (int i = 0; i < steps; ++i) {
    drawing.body += fmt::format("<rect x=\"{:.1f}\" y=\"5\" width=\"{:.1f}\" height=\"{:.0f}\" fill=\"{}\"/>\n",
                                left + bar * i / steps, bar / steps + 0.5, height, hex(ramp((i + 0.5) / steps)));
  }
  drawing.body += svg_text(left + bar + 6, 14, most, "tick");
  drawing.body += svg_text(left + bar + 20 + text_width(most), 14, map.value_label, "axis-name");
  drawing.width = left + bar + 28 + text_width(most) + text_width(map.value_label);
  drawing.height = 20;
  return drawing;
}

std::string placed(const Drawing& drawing, double x, double y) {
  return fmt::format("<g transform=\"translate({:.1f} {:.1f})\">\n{}</g>\n", x, y, drawing.body);
}

}  // namespace

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

}  // namespace tapetune
