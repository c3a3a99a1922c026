// Adapters on disk, in PEFT's layout: adapter_config.json and adapter_model.safetensors; beside them tapetune.json with
// the settings that PEFT does not know.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "adapters/build_model.h"
#include "checkpoint/checkpoint.h"
#include "core/file.h"

namespace tapetune {

// A parameter's name in adapter_model.safetensors, and back; a name that is none of PEFT's stays as it is.
std::string name_on_disk(std::string_view parameter);
std::string name_from_disk(std::string_view stored);

// Whether an adapter's folder, as save_adapter or `merge --adapter` writes it, has a file of this name.
bool is_adapter_file(std::string_view name);

// Written whole or not at all. base: the folder of the model that it was made for. others: what becomes of other files
// in a folder that is replaced.
void save_adapter(const AdaptedModel& adapted, const std::filesystem::path& folder, const std::filesystem::path& base,
                  bool replace, StagedFolder::Others others = StagedFolder::Others::refuse);

// Of its tensors on disk.
std::uint64_t adapter_bytes(const AdaptedModel& adapted);

// The same files into a folder that is there already.
void write_adapter_files(const AdaptedModel& adapted, const std::filesystem::path& folder,
                         const std::filesystem::path& base);

// What an adapter's files say about its method; config: of the model that it is for. An adapter may also be a whole
// checkpoint whose position encoding has tensors, here and below.
MethodOptions adapter_options(const ModelConfig& config, const std::filesystem::path& folder);

// The model that an adapter's adapter_config.json names.
struct AdapterBase {
  std::string name;              // base_model_name_or_path; empty: it names none
  std::filesystem::path folder;  // that folder, from the current one or the adapter's; empty: it is not here
};
AdapterBase adapter_base(const std::filesystem::path& folder);

// The parameters as they are stored, under their own names. Fails, naming the tensor, as load_adapter does. The model's
// weights may be without numbers (on the meta device); frozen_head is the head before training.
StoredTensors stored_parameters(const AdaptedModel& adapted, const at::Tensor& frozen_head,
                                const std::filesystem::path& folder);

// The parameters' values from an adapter's folder. Fails, naming the tensor, as load_adapter does.
void restore_parameters(const AdaptedModel& adapted, const LlamaWeights& base, const std::filesystem::path& folder);

// Fails, naming the tensor, where the adapter is of another model, lacks a tensor or has one too many.
AdaptedModel load_adapter(const ModelConfig& config, const LlamaWeights& weights, const std::filesystem::path& folder,
                          at::ScalarType dtype);

// A checkpoint as it is: plain, or with the position encoding whose tensors it holds. weights: all of its own.
// train_all: every tensor asks for a gradient.
AdaptedModel open_adapted(const Checkpoint& checkpoint, const LlamaWeights& weights, at::ScalarType dtype,
                          bool train_all = false);

}  // namespace tapetune
