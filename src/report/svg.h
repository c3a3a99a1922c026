// What charts are drawn with: text, numbers and the frame of an SVG picture.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace tapetune {

inline constexpr double line_height = 15;  // of 12-pixel text
inline constexpr std::size_t palette = 8;  // colours: CSS variables --c0 to --c7

struct Drawing {
  std::string body;
  double width = 0, height = 0;
};

// Of 12-pixel text, rounded up.
double text_width(std::string_view text);
std::string svg_text(double x, double y, std::string_view words, std::string_view classes, std::string_view more = "");
std::string whole_svg(const Drawing& drawing, std::string_view title, std::string_view classes);
// Five significant digits.
std::string shown_number(double value);

}  // namespace tapetune
