#include "adapters/theta_scaling/theta_scaling.h"

#include "adapters/lora/lora.h"

namespace tapetune {

void theta_defaults(MethodOptions& options) { options.theta = 1e6; }

// The base is a rotary setting like any other and already in the model's config; what is left is the part that trains.
void make_theta_scaling(ModelBuilder& model) { make_lora(model); }

}  // namespace tapetune
