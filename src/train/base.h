// What a recipe starts from, the token files that fit it, and what a run has made of it.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <optional>
#include <string>

#include "adapters/build_model.h"
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
// The run folder of RUN, RUN/adapter or RUN/checkpoints/step-N; empty where it is none of these.
std::filesystem::path run_of(const std::filesystem::path& folder);

// What a run has trained.
struct RunAdapter {
  std::filesystem::path folder;      // of the adapter's files
  std::optional<std::int64_t> step;  // of the checkpoint that it is; none: the run's result
};

// Of RUN: RUN/adapter, or the newest checkpoint of a run that is not finished, with a warning. Of RUN/adapter and
// RUN/checkpoints/step-N: itself. Fails where there is none.
RunAdapter find_adapter(const std::filesystem::path& folder);

// The context of what a run trained: that of its training, where the method's positions are made for less. Dynamic
// scaling keeps its rule, which begins at the original context.
std::int64_t trained_context(const ModelConfig& config, const Recipe& recipe);

// Warns where training sequences are longer than the positions are scaled for: the base model's context times the
// factor, unless the method raised rope_theta.
void warn_beyond_scaling(const ModelConfig& base, const ModelConfig& adapted, std::int64_t context);

struct TrainedModel {
  Recipe recipe;  // with its paths as they were found
  BaseModel base;
  RunAdapter trained;
  AdaptedModel adapted;
};

// folder: RUN, RUN/adapter or RUN/checkpoints/step-N. dtype: to compute in; the recipe's where it is not given. Fails
// where the base model changed since the training, or with `any_base` warns.
TrainedModel open_run(const std::filesystem::path& folder, std::optional<at::ScalarType> dtype = std::nullopt,
                      at::Device device = at::kCPU, bool any_base = false);

}  // namespace tapetune
