#include "report/svg.h"

#include <fmt/format.h>

#include <algorithm>

#include "report/chart.h"

namespace tapetune {

double text_width(std::string_view text) {
  constexpr double letter = 6.5;
  const auto continues = [](char c) { return (static_cast<unsigned char>(c) & 0xC0) == 0x80; };
  return letter * static_cast<double>(text.size() -
                                      static_cast<std::size_t>(std::count_if(text.begin(), text.end(), continues)));
}

std::string svg_text(double x, double y, std::string_view words, std::string_view classes, std::string_view more) {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" class=\"{}\"{}>{}</text>\n", x, y, classes, more, escaped(words));
}

std::string whole_svg(const Drawing& drawing, std::string_view title, std::string_view classes) {
  return fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"chart {}\" viewBox=\"0 0 {:.0f} {:.0f}\" role=\"img\" "
      "aria-label=\"{}\">\n{}</svg>\n",
      classes, drawing.width, drawing.height, escaped(title), drawing.body);
}

std::string shown_number(double value) { return fmt::format("{:.5g}", value); }

}  // namespace tapetune
