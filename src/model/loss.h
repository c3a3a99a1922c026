// Cross-entropy of the next token without ever holding all logits.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "model/linear.h"

namespace tapetune {

// The negative log-likelihood of each target; logits exist for a block of tokens at a time.
at::Tensor token_losses(const Linear& head, const at::Tensor& hidden,
                        const at::Tensor& targets);  // [N, hidden], [N] -> [N] f32

}  // namespace tapetune
