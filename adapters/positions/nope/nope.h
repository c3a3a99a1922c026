// No position encoding (arXiv 2305.19466): what a token can know of positions comes from the causal mask.
#pragma once

#include "adapters/component.h"

namespace tapetune {

PositionComponent nope_component();

}  // namespace tapetune
