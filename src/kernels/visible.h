// Who sees whom in causal attention: query i sees keys max(last start <= i, i - window + 1) … i.
#pragma once

#include <cstdint>
#include <vector>

namespace tapetune::kernels {

struct Visible {
  // Rows and heads whose attention begins anew at some tokens. A head in several regions begins anew at all their
  // starts.
  struct Region {
    std::int64_t row = -1;              // of the batch; -1: all
    std::int64_t head = 0, heads = -1;  // the first head and how many; -1: all that follow
    std::vector<std::int64_t> starts;   // from 0 on, increasing
  };
  std::vector<Region> regions;  // none: everything from the first token on
  std::int64_t window = 0;      // keys that a token sees, itself included; 0: all

  bool plain() const { return regions.empty() && window == 0; }
  // With a layer's own window (0: none) besides: the narrower one acts.
  Visible within(std::int64_t other) const;
  // As some of the heads have it, counted from the first of them.
  Visible of_heads(std::int64_t first, std::int64_t count) const;
  // As one row of the batch has it, alone.
  Visible of_row(std::int64_t row) const;

  // Rows, heads and tokens that attend among themselves.
  struct Piece {
    std::int64_t row, rows, head, heads, begin, end;
  };
  // All of them, in the order of rows, heads, tokens; refuses starts that do not fit so many tokens.
  std::vector<Piece> pieces(std::int64_t rows, std::int64_t heads, std::int64_t tokens) const;
  // Of query and key that see each other, in one row (its first) of so many tokens, over all heads.
  double pairs(std::int64_t tokens, std::int64_t heads) const;
};

}  // namespace tapetune::kernels
