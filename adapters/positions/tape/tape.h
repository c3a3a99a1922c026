// TAPE (arXiv 2501.00712): a position state per key/value head that every layer updates from context, by matrices
// that leave it equivariant: only differences of positions matter, as with RoPE.
#pragma once

#include "adapters/component.h"

namespace tapetune {

PositionComponent tape_component();

}  // namespace tapetune
