// PEFT's adapter_config.json, both ways.
#pragma once

#include <filesystem>
#include <string>

#include "adapters/build_model.h"

namespace tapetune {

inline constexpr const char* merge_in_peft =
    "load it with PEFT, save model.merge_and_unload().save_pretrained(DIR), and use DIR as the model";
inline constexpr const char* not_mergeable =
    "it cannot be merged into the weights, in PEFT either, so train a LoRA adapter instead";

// Whether PEFT has all that an adapter of this method trains.
bool peft_loads(const MethodOptions& options);
Json peft_config(const AdaptedModel& adapted, const std::filesystem::path& base);
// Embeddings and head train as one matrix.
bool stays_tied(const AdaptedModel& adapted);

// stored: the tensors of the adapter; model: what it is for. Fails, naming the setting and what to do in PEFT, where
// tapetune does not have it.
MethodOptions options_from_peft(const Json& config, const StoredTensors& stored, const ModelConfig& model,
                                const std::string& where);

}  // namespace tapetune
