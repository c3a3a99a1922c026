#include "kernels/visible.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <set>

#include "core/error.h"

namespace tapetune::kernels {

namespace {

// The first head behind a region.
std::int64_t end_of(const Visible::Region& region) {
  return region.heads < 0 ? std::numeric_limits<std::int64_t>::max() : region.head + region.heads;
}

void check_starts(const Visible& visible, std::int64_t tokens) {
  for (const Visible::Region& region : visible.regions) {
    const auto& starts = region.starts;
    if (starts.empty()) continue;
    const bool rising = std::is_sorted(starts.begin(), starts.end(), std::less_equal<>());
    if (starts.front() != 0 || !rising || starts.back() >= std::max<std::int64_t>(tokens, 1)) {
      fail("attention", "starts must begin at 0, increase and lie within {} tokens; they are {}.", tokens,
           fmt::join(starts, ", "));
    }
  }
  if (visible.window < 0) fail("attention", "a window of {} keys is less than one.", visible.window);
}

}  // namespace

Visible Visible::within(std::int64_t other) const {
  Visible both = *this;
  if (window == 0 || (other > 0 && other < window)) both.window = other;
  return both;
}

Visible Visible::of_heads(std::int64_t first, std::int64_t count) const {
  Visible own{{}, window};
  for (const Region& region : regions) {
    const std::int64_t from = std::max(region.head, first), to = std::min(end_of(region), first + count);
    if (from < to) own.regions.push_back({region.row, from - first, to - from, region.starts});
  }
  return own;
}

Visible Visible::of_row(std::int64_t row) const {
  Visible own{{}, window};
  for (const Region& region : regions) {
    if (region.row < 0 || region.row == row) own.regions.push_back({-1, region.head, region.heads, region.starts});
  }
  return own;
}

std::vector<Visible::Piece> Visible::pieces(std::int64_t rows, std::int64_t heads, std::int64_t tokens) const {
  check_starts(*this, tokens);
  const bool rows_differ = std::ranges::any_of(regions, [](const Region& region) { return region.row >= 0; });
  const std::int64_t together = rows_differ ? 1 : rows;
  std::vector<Piece> all;
  for (std::int64_t row = 0; row < rows; row += together) {
    // Neighbouring heads with the same starts go together: these may change where a region begins or ends.
    std::set<std::int64_t> edges{0, heads};
    for (const Region& region : regions) {
      edges.insert(std::min(region.head, heads));
      edges.insert(std::min(end_of(region), heads));
    }
    for (auto edge = edges.begin(); std::next(edge) != edges.end(); ++edge) {
      const std::int64_t head = *edge, count = *std::next(edge) - head;
      std::set<std::int64_t> starts{0};
      for (const Region& region : regions) {
        if (region.row >= 0 && region.row != row) continue;
        if (head >= region.head && head < end_of(region)) starts.insert(region.starts.begin(), region.starts.end());
      }
      for (auto start = starts.begin(); start != starts.end(); ++start) {
        const std::int64_t end = std::next(start) == starts.end() ? tokens : *std::next(start);
        all.push_back({row, together, head, count, *start, end});
      }
    }
  }
  return all;
}

double Visible::pairs(std::int64_t tokens, std::int64_t heads) const {
  double sum = 0;
  for (const Piece& piece : of_row(0).pieces(1, heads, tokens)) {
    const auto length = static_cast<double>(piece.end - piece.begin);
    const double seen = window == 0 ? length : std::min(length, static_cast<double>(window));
    // The first `seen` tokens see one more each, all others that many.
    sum += static_cast<double>(piece.heads) * (seen * (seen + 1) / 2 + (length - seen) * seen);
  }
  return sum;
}

}  // namespace tapetune::kernels
