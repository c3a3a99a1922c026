// results.json: every number of a comparison.
#pragma once

#include "compare/comparison.h"
#include "core/json.h"

namespace tapetune {

// All that depends on when and where it ran is in `cost`: the rest is the same however often a comparison was resumed.
Json results_json(const Comparison& comparison);

}  // namespace tapetune
