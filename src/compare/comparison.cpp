#include "compare/comparison.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "core/digits.h"

namespace tapetune {

std::size_t headline_context(const Comparison& c) {
  const auto trained = std::find(c.contexts.begin(), c.contexts.end(), c.trained_context);
  return trained == c.contexts.end() ? c.contexts.size() - 1 : static_cast<std::size_t>(trained - c.contexts.begin());
}

const Entry& best_entry(const Comparison& c, std::size_t context) {
  return *std::min_element(c.entries.begin() + 1, c.entries.end(), [&](const Entry& a, const Entry& b) {
    return a.perplexity[0][context].perplexity < b.perplexity[0][context].perplexity;
  });
}

double best_perplexity(const Comparison& comparison, std::size_t text, std::size_t context) {
  double best = INFINITY;
  for (const Entry& entry : comparison.entries) best = std::min(best, entry.perplexity[text][context].perplexity);
  return best;
}

std::string machine_text(const std::string& machine, int threads, int ranks) {
  return fmt::format("{}, {}{}", machine, counted(threads, "thread"),
                     ranks > 1 ? fmt::format(" on each of {} ranks", ranks) : "");
}

}  // namespace tapetune
