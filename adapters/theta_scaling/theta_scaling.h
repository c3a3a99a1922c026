// Theta scaling (arXiv 2309.16039): LoRA, and a larger rope_theta, so that slow frequencies reach further.
#pragma once

#include "adapters/adapter.h"

namespace tapetune {

void theta_defaults(MethodOptions& options);
void inject_theta_scaling(Injection& model);

}  // namespace tapetune
