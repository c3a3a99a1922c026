// LoRA (arXiv 2106.09685): a low-rank pair beside frozen projections; with rsLoRA's scale (2312.03732) and DoRA's
// magnitudes (2402.09353).
#pragma once

#include "adapters/adapter.h"

namespace tapetune {

// What the product of a pair is multiplied by before it is added.
double low_rank_scale(const MethodOptions& options);

void check_low_rank(const MethodOptions& options);
void inject_low_rank(Injection& model);

}  // namespace tapetune
