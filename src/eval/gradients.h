// Loss and gradients of a text, to compare with other implementations.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "adapters/build_model.h"
#include "model/training.h"

namespace tapetune {

// "loss", the mean over the tokens, and "grad.NAME" of every trained parameter that has one; without dropout.
std::map<std::string, at::Tensor> loss_and_gradients(const AdaptedModel& adapted,
                                                     const std::vector<std::int64_t>& tokens,
                                                     Checkpointing checkpointing, std::uint64_t seed);

}  // namespace tapetune
