#include "report/chart.h"

#include <fmt/format.h>

#include <array>

#include "report/svg.h"

namespace tapetune {

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
