// Opening checkpoints with whatever position encoding tapetune has.
#pragma once

#include <filesystem>
#include <string_view>

#include "checkpoint/checkpoint.h"

namespace tapetune {

// As Checkpoint::open, with all of them.
Checkpoint open_checkpoint(const std::filesystem::path& folder);

// Whether a checkpoint's encoding has tensors of its own.
bool has_position_tensors(const Checkpoint& checkpoint);

// For those who read a config.json alone; `where` names it in errors.
void require_known_position(const ModelConfig& config, std::string_view where);

}  // namespace tapetune
