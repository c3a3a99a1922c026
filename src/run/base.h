// What a recipe starts from, and the token files that fit it.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <optional>
#include <string>

#include "adapters/build_model.h"
#include "checkpoint/checkpoint.h"
#include "data/token_file.h"
#include "recipe/recipe.h"

namespace tapetune {

struct BaseModel {
  ModelConfig config;
  LlamaWeights weights;
  at::ScalarType dtype;             // to compute in
  std::string path;                 // folder of the checkpoint; empty where the weights were drawn
  std::filesystem::path tokenizer;  // folder with tokenizer.json; empty: none is known
};

// The checkpoint of a recipe, mapped or copied to a GPU, or weights drawn as its seed says.
BaseModel open_base(const Recipe& recipe, at::Device device = at::kCPU);
// The same of a checkpoint that is open already.
BaseModel base_from(const Recipe& recipe, const Checkpoint& checkpoint, at::Device device);

// Of the tokenizer in this folder; none where it has no tokenizer.json, or the name is empty.
std::optional<Vocabulary> known_vocabulary(const std::filesystem::path& folder);
// A packed file, or 16-bit tokens without a header where its name ends in .bin. Fails where it is of another
// vocabulary, or of a larger one than the model's.
TokenFile open_tokens(const std::filesystem::path& path, const std::optional<Vocabulary>& vocabulary,
                      const ModelConfig& config);

// The context of what a run trained: that of its training, where the method's positions are made for less. Dynamic
// scaling keeps its rule, which begins at the original context.
std::int64_t trained_context(const ModelConfig& config, const Recipe& recipe);

// Warns where training sequences are longer than the positions are scaled for: the base model's context times the
// factor, unless the method raised rope_theta.
void warn_beyond_scaling(const ModelConfig& base, const ModelConfig& adapted, std::int64_t context);

}  // namespace tapetune
