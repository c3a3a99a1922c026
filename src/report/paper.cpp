#include "report/paper.h"

#include <fmt/format.h>

#include <algorithm>

#include "report/tables.h"

namespace tapetune {

namespace {

constexpr PaperRow paper[] = {
    {"Proof-pile", "lora", {3.828, 3.369, 3.064, 2.867}},
    {"Proof-pile", "longlora", {3.918, 3.455, 3.153, 2.956}},
    {"Proof-pile", "theta-scaling", {3.864, 3.415, 3.121, 2.934}},
    {"Proof-pile", "tape", {3.641, 3.196, 2.901, 2.708}},
    {"PG19", "lora", {9.791, 9.098, 8.572, 8.199}},
    {"PG19", "longlora", {9.989, 9.376, 8.948, 8.645}},
    {"PG19", "theta-scaling", {9.257, 8.640, 8.241, 7.999}},
    {"PG19", "tape", {8.226, 7.642, 7.278, 7.063}},
};

constexpr std::string_view paper_texts[] = {"Proof-pile", "PG19"};

}  // namespace

std::vector<PaperRow> paper_rows(const Comparison& c) {
  const ModelConfig& m = c.base_config;
  const bool llama2_7b = m.architecture == Architecture::llama && m.layers == 32 && m.hidden_size == 4096 &&
                         m.intermediate_size == 11008 && m.kv_heads == 32 && m.context == 4096;
  if (!llama2_7b || c.trained_context != paper_contexts[3]) return {};
  return {std::begin(paper), std::end(paper)};
}

std::vector<std::string> paper_headings(const Comparison& c) {
  std::vector<std::string> headings;
  if (paper_rows(c).empty()) return headings;
  for (const std::string_view text : paper_texts) {
    headings.push_back(fmt::format("paper: {}, {}", text, paper_contexts[3]));
  }
  return headings;
}

std::vector<std::string> paper_cells(const Comparison& c, const Entry& entry) {
  std::vector<std::string> cells;
  const std::vector<PaperRow> rows = paper_rows(c);
  for (const std::string_view text : paper_texts) {
    const auto row = std::find_if(rows.begin(), rows.end(),
                                  [&](const PaperRow& r) { return r.text == text && r.method == entry.method; });
    if (!rows.empty()) cells.push_back(row == rows.end() ? "–" : shown_perplexity(row->perplexity[3]));
  }
  return cells;
}

}  // namespace tapetune
