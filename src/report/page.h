// report.html: one self-contained page, for light and dark screens and print.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "compare/comparison.h"

namespace tapetune {

std::string report_page(const Comparison& comparison);

// Each chart as an SVG file and its numbers as a CSV file: name, contents.
std::vector<std::pair<std::string, std::string>> chart_files(const Comparison& comparison);

}  // namespace tapetune
