// The TAPE paper's table for Llama-2 7B at 8192 tokens (arXiv 2501.00712), beside a comparison of that model.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "compare/comparison.h"

namespace tapetune {

struct PaperRow {
  std::string_view text, method;
  double perplexity[4];
};
constexpr std::int64_t paper_contexts[4] = {1024, 2048, 4096, 8192};
// Empty for any other base model or training context.
std::vector<PaperRow> paper_rows(const Comparison& comparison);
// The paper's numbers at its longest context, as columns beside ours: their headings, and an entry's cells.
std::vector<std::string> paper_headings(const Comparison& comparison);
std::vector<std::string> paper_cells(const Comparison& comparison, const Entry& entry);

}  // namespace tapetune
