// Cross-entropy of the next token without ever holding all logits.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "model/llama.h"

namespace tapetune {

// The negative log-likelihood of each target; logits exist for a block of tokens at a time. For evaluation.
at::Tensor token_losses(const Llama& model, const at::Tensor& hidden,
                        const at::Tensor& targets);  // [N, hidden], [N] -> [N] f32

// The sum of the losses, for training: gradients are formed block by block in the forward, where the logits are at
// hand. A negative target does not count. [N, hidden] of one sequence or [B, N, hidden] of several, as many targets
// -> [].
at::Tensor loss_sum(const Llama& model, const at::Tensor& sequences, const at::Tensor& targets,
                    const std::optional<Training>& training = std::nullopt);

}  // namespace tapetune
