// The tables of a comparison: CSV files, and Markdown for the terminal and table.md.
#pragma once

#include <string>

#include "compare/comparison.h"

namespace tapetune {

std::string results_csv(const Comparison& comparison);
std::string cost_csv(const Comparison& comparison);
std::string markdown(const Comparison& comparison);

// One sentence about how perplexity was measured.
std::string protocol_sentence(const Comparison& comparison);
// How the recipes' positions differ: "lora, tape: yarn scaling, factor 4; longlora: linear scaling, factor 4".
std::string position_differences(const Comparison& comparison);

// 4.024, 31.79, 512.3: four significant digits.
std::string shown_perplexity(double value);

}  // namespace tapetune
