// Theta scaling (arXiv 2309.16039): LoRA, and a larger rope_theta, so that slow frequencies reach further.
#pragma once

#include "adapters/adapter.h"

namespace tapetune {

void theta_defaults(MethodOptions& options);
void make_theta_scaling(ModelBuilder& model);

}  // namespace tapetune
