// What a recipe starts from, the token files that fit it, and what a run has made of it.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <optional>
#include <string>

#include "adapters/adapter.h"
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

// Of the tokenizer in this folder; none where it has no tokenizer.json, or the name is empty.
std::optional<Vocabulary> known_vocabulary(const std::filesystem::path& folder);
// A packed file, or 16-bit tokens without a header where its name ends in .bin. Fails where it is of another
// vocabulary, or of a larger one than the model's.
TokenFile open_tokens(const std::filesystem::path& path, const std::optional<Vocabulary>& vocabulary,
                      const ModelConfig& config);

// Whether this is the folder of a run.
bool is_run(const std::filesystem::path& folder);

// What a run has trained so far.
struct RunAdapter {
  std::filesystem::path folder;      // RUN/adapter, or the newest checkpoint of a run that is not finished
  std::optional<std::int64_t> step;  // of that checkpoint
};

// Fails where there is neither.
RunAdapter find_adapter(const std::filesystem::path& folder);

struct TrainedModel {
  Recipe recipe;
  BaseModel base;
  RunAdapter trained;
  AdaptedModel adapted;
};

// dtype: to compute in; the recipe's where it is not given.
TrainedModel open_run(const std::filesystem::path& folder, std::optional<at::ScalarType> dtype = std::nullopt,
                      at::Device device = at::kCPU);

}  // namespace tapetune
