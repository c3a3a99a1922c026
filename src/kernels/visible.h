// Who sees whom in causal attention: query i sees keys max(last start <= i, i - window + 1) … i.
#pragma once

#include <cstdint>
#include <vector>

namespace tapetune::kernels {

struct Visible {
  // Rows and heads whose attention begins anew at some tokens.
  struct Region {
    std::int64_t row = -1;              // of the batch; -1: all
    std::int64_t head = 0, heads = -1;  // the first head and how many; -1: all that follow
    std::vector<std::int64_t> starts;   // from 0 on, increasing
  };
  std::vector<Region> regions;  // none: everything from the first token on
  std::int64_t window = 0;      // keys that a token sees, itself included; 0: all
};

}  // namespace tapetune::kernels
