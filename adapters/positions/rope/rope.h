// RoPE (arXiv 2104.09864), as Llama has it.
#pragma once

#include "adapters/component.h"

namespace tapetune {

PositionComponent rope_component();

}  // namespace tapetune
