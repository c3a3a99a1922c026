// LoRA (arXiv 2106.09685): low-rank matrices A and B beside frozen projections; with rsLoRA's scale (2312.03732) and
// DoRA's magnitudes (2402.09353).
#pragma once

#include "adapters/component.h"

namespace tapetune {

AdapterComponent lora_component();

// What PEFT's adapter_config.json says, as settings. stored: the tensors of the adapter; model: what it is for. Fails,
// naming the setting and what to do in PEFT, where tapetune does not have it.
std::vector<std::string> lora_from_peft(const Json& config, const StoredTensors& stored, const ModelConfig& model,
                                        const std::string& where);

}  // namespace tapetune
