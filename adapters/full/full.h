// Weights of the model itself that train: all of them, or embeddings, norms and the head beside a method.
#pragma once

#include "adapters/adapter.h"

namespace tapetune {

void make_full(ModelBuilder& model);

// What `train_also` names, by structure. Tied embeddings are trained once and stay tied unless they are to be untied.
void train_also(ModelBuilder& model);

}  // namespace tapetune
