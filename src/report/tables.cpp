#include "report/tables.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/digits.h"
#include "core/markdown.h"
#include "report/chart.h"
#include "report/paper.h"

namespace tapetune {

namespace {

bool beyond(const Entry& entry, const ContextPerplexity& row) { return row.context > entry.context; }

}  // namespace

std::string results_csv(const Comparison& c) {
  std::string text = "text,name,method,context,stride,windows,tokens,loss,perplexity,beyond_context\n";
  for (std::size_t t = 0; t < c.texts.size(); ++t) {
    for (const Entry& entry : c.entries) {
      for (const ContextPerplexity& row : entry.perplexity[t]) {
        text += fmt::format("{},{},{},{},{},{},{},{},{},{}\n", csv_field(c.texts[t].name), csv_field(entry.name),
                            entry.method, row.context, row.stride, row.windows, row.tokens, row.loss, row.perplexity,
                            beyond(entry, row));
      }
    }
  }
  return text;
}

std::string cost_csv(const Comparison& c) {
  std::string text = "name,method,trained_parameters,step_seconds,tokens_per_s,peak_mb\n";
  for (const Entry& entry : c.entries) {
    if (entry.method == "none") continue;
    text += fmt::format("{},{},{},{:.4f},{:.1f},{:.0f}\n", csv_field(entry.name), entry.method,
                        entry.cost.trained_parameters, entry.cost.step_seconds, entry.cost.tokens_per_s,
                        entry.cost.peak_mb);
  }
  return text;
}

std::string markdown(const Comparison& c) {
  std::string text;
  bool marked = false;
  for (std::size_t t = 0; t < c.texts.size(); ++t) {
    text += fmt::format("{}Perplexity on {} tokens of {}, protocol {}:\n\n|  |", t == 0 ? "" : "\n",
                        grouped(c.texts[t].tokens), markdown_text(c.texts[t].name), protocol_name(c.protocol));
    const std::vector<std::string> headings = paper_headings(c);
    for (const std::int64_t context : c.contexts) text += fmt::format(" {} |", context);
    for (const std::string& heading : headings) text += fmt::format(" {} |", heading);
    text += "\n|---|";
    for (std::size_t i = 0; i < c.contexts.size() + headings.size(); ++i) text += "---:|";
    for (const Entry& entry : c.entries) {
      text += fmt::format("\n| {} |", markdown_text(entry.name));
      for (std::size_t i = 0; i < c.contexts.size(); ++i) {
        const ContextPerplexity& row = entry.perplexity[t][i];
        const std::string mark = row.perplexity == best_perplexity(c, t, i) ? "**" : "";
        marked = marked || beyond(entry, row);
        text +=
            fmt::format(" {}{}{}{} |", mark, shown_perplexity(row.perplexity), mark, beyond(entry, row) ? "\\*" : "");
      }
      for (const std::string& cell : paper_cells(c, entry)) text += fmt::format(" {} |", cell);
    }
    text += "\n";
  }
  if (marked) text += "\n\\* longer than the model's context\n";
  text += fmt::format("\n{}\n", protocol_sentence(c));
  if (!c.equal_positions.empty()) {
    text += fmt::format(
        "\nThe recipes scale positions differently ({}), so these numbers compare methods and scalings at once. To "
        "compare the methods with equal positions:\n\n{}",
        markdown_text(position_differences(c)), markdown_block("sh", c.equal_positions));
  }
  return text;
}

std::string protocol_sentence(const Comparison& c) {
  std::string every = "every half context";
  if (!c.entries.empty() && !c.entries[0].perplexity.empty()) {
    const std::vector<ContextPerplexity>& rows = c.entries[0].perplexity[0];
    const bool same = std::all_of(rows.begin(), rows.end(),
                                  [&](const ContextPerplexity& row) { return row.stride == rows[0].stride; });
    const bool half = std::all_of(rows.begin(), rows.end(),
                                  [](const ContextPerplexity& row) { return row.stride == (row.context + 1) / 2; });
    if (!rows.empty() && !half) {
      every = same ? fmt::format("every {} tokens", rows[0].stride)
                   : fmt::format("every {} tokens (at shorter contexts every context)", rows.back().stride);
    }
  }
  switch (c.protocol) {
    case Protocol::sliding:
      return fmt::format(
          "Sliding window: a window of the given context starts {}, and each token is scored once, in "
          "the first window that contains it.",
          every);
    case Protocol::longlora:
      return fmt::format(
          "As in the LongLoRA and TAPE papers: a window of the given context starts {}, and all tokens "
          "of every window are scored.",
          every);
    case Protocol::blocks:
      break;
  }
  return "Non-overlapping windows of the given context, as in training; the remainder at the end is not scored.";
}

std::string position_differences(const Comparison& c) {
  std::vector<std::string> groups;
  groups.reserve(c.positions.size());
  for (const PositionGroup& group : c.positions) {
    groups.push_back(fmt::format("{}: {}", fmt::join(group.recipes, ", "), group.settings));
  }
  return fmt::format("{}", fmt::join(groups, "; "));
}

std::string shown_perplexity(double value) {
  return value < 10    ? fmt::format("{:.3f}", value)
         : value < 100 ? fmt::format("{:.2f}", value)
         : value < 1e4 ? fmt::format("{:.1f}", value)
                       : fmt::format("{:.3g}", value);
}

}  // namespace tapetune
