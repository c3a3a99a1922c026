// The report of a comparison, as files.
#pragma once

#include <filesystem>

#include "compare/comparison.h"

namespace tapetune {

// Writes report.html, results.json, results.csv, cost.csv, table.md and charts/, each file atomically.
void write_report(const Comparison& comparison, const std::filesystem::path& out);

}  // namespace tapetune
