// A GGUF file for llama.cpp, written tensor by tensor: whole or absent.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <functional>
#include <string>

#include "checkpoint/config.h"
#include "gguf/format.h"

namespace tapetune::gguf {

struct ExportOptions {
  TensorType type = TensorType::f16;  // of matrices: f32, f16, bf16 or q8_0; vectors are f32, as llama.cpp wants them
  std::filesystem::path tokenizer;    // a folder with tokenizer.json
  std::string name;                   // general.name
  bool replace = false;               // an existing file
};

// `load` gives the tensors of a checkpoint with this config by their names there, when their turn comes. Refuses,
// before any is loaded, what llama.cpp cannot compute; and numbers that the type cannot hold, with the tensor's name.
void write_gguf(const std::filesystem::path& path, const ModelConfig& config,
                const std::function<at::Tensor(const std::string& name)>& load, const ExportOptions& options);

}  // namespace tapetune::gguf
