// Weights of the model itself that train, beside an adapter and position encoding or without: `train_also`.
#pragma once

#include "adapters/build_model.h"

namespace tapetune {

// By structure. Tied embeddings are trained once and stay tied unless they are to be untied.
void train_also(const MethodOptions& options, ModelBuilder& model);

}  // namespace tapetune
