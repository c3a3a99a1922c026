// What PEFT's adapter_config.json says, as settings of a method.
#pragma once

#include <string>

#include "adapters/options.h"
#include "checkpoint/folder.h"
#include "core/json.h"

namespace tapetune {

// stored: the tensors of the adapter; model: what it is for. Fails, naming the setting and what to do in PEFT, where
// the adapter is of a kind that tapetune does not have.
MethodOptions options_from_peft(const Json& config, const StoredTensors& stored, const ModelConfig& model,
                                const std::string& where);

}  // namespace tapetune
