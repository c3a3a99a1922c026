// ALiBi (arXiv 2108.12409): scores fall with the distance of query and key, with a slope for each head.
#pragma once

#include "adapters/component.h"

namespace tapetune {

PositionComponent alibi_component();

}  // namespace tapetune
