// Whole checkpoints that hold TAPE's tensors beside Llama's, under the authors' names: what their training saves, and
// what a merge writes.
#pragma once

#include "adapters/component.h"

namespace tapetune {

bool is_tape_tensor(const ModelConfig& config, std::string_view name);

// What config.json says, and where it says nothing, what the authors' code does: each channel takes its own head.
Settings stored_tape_settings(const Checkpoint& checkpoint);

// The Python files with which transformers runs TAPE, and the keys of config.json that refer to them.
void export_tape(const Settings& settings, const ModelConfig& config, const std::filesystem::path& tokenizer,
                 Files& files);

}  // namespace tapetune
