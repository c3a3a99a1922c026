// report.html: one page with everything in it, readable without a network, in light, dark and print.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "report/comparison.h"

namespace tapetune {

std::string report_page(const Comparison& comparison);

// A file for each chart, as SVG and its numbers as CSV: name, contents.
std::vector<std::pair<std::string, std::string>> chart_files(const Comparison& comparison);

}  // namespace tapetune
