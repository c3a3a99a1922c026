// A trained run, or an adapter with its base model, as one model: tensor by tensor from mapped files, so that the
// memory it takes does not depend on the model's size.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "adapters/build_model.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/writer.h"
#include "gguf/format.h"
#include "recipe/recipe.h"

namespace tapetune {

struct PositionComponent;

// What is merged, opened but not read.
struct MergeInput {
  std::filesystem::path folder;      // of the run, or of the adapter
  std::optional<Recipe> recipe;      // of a run
  std::filesystem::path adapter;     // folder of the adapter
  std::optional<std::int64_t> step;  // of the checkpoint that it is; none: a run's result
  std::optional<Checkpoint> base;    // none: the recipe drew its weights
  ModelConfig config;                // of the base
  std::filesystem::path carry_from;  // folder with tokenizer and generation files; empty: none
  MethodOptions method;
};

// The folder of a run, of one of its checkpoints, or of an adapter. given_model: the base model's folder; empty: what
// the run's recipe or the adapter's adapter_config.json names.
MergeInput open_merge(const std::filesystem::path& folder, const std::filesystem::path& given_model = {});

// The model that a merge gives.
class Merged {
 public:
  // dtype: of all tensors; none: each has the base's. Fails, naming the tensor, where the adapter does not fit.
  explicit Merged(const MergeInput& input, std::optional<at::ScalarType> dtype = std::nullopt);
  Merged(Merged&&) = default;  // no copy: sources point into it

  const ModelConfig& config() const { return config_; }
  const PositionComponent& encoding() const { return *encoding_; }
  const std::vector<PlannedTensor>& tensors() const { return plan_; }
  // Of a tensor of the plan. Fails, naming it, where it has NaN or Inf.
  at::Tensor rows(const std::string& name, std::int64_t begin, std::int64_t count) const;
  void stream(const std::string& name, const PutRows& put) const;
  at::Tensor tensor(const std::string& name) const;
  void store_as(const std::string& name, at::ScalarType dtype);

 private:
  // Where a tensor's numbers come from: trained as a whole, or the base's; and what the adapter makes of them.
  struct Source {
    std::size_t planned = 0;              // its place in the plan
    const StoredTensor* whole = nullptr;  // trained
    std::string base;                     // name in the base
    std::optional<Adapter::Merge> merge;
  };
  Source source_of(const std::string& name) const;
  void plan(const MergeInput& input, std::optional<at::ScalarType> dtype);
  void require_consumed() const;
  bool ends_differ() const;
  const at::Tensor& drawn(const std::string& name) const;
  at::Tensor base_rows(const std::string& name, std::int64_t begin, std::int64_t count) const;
  const StoredTensor* trained(const std::string& name) const;

  ModelConfig config_;
  std::optional<Checkpoint> base_;
  StoredTensors trained_;  // by the parameters' names
  std::shared_ptr<const Adapter> adapter_;
  const PositionComponent* encoding_ = nullptr;
  bool base_tied_ = false;
  std::vector<PlannedTensor> plan_;
  std::map<std::string, Source> sources_;
  std::function<std::map<std::string, at::Tensor>()> draw_;  // a base that was drawn
  mutable std::map<std::string, at::Tensor> drawn_;
};

struct MergeOptions {
  std::filesystem::path out;
  std::optional<at::ScalarType> dtype;
  std::uint64_t shard_bytes = 5'000'000'000;
  bool replace = false;
  bool any_base = false;  // also where the base's weights are not those of the training
  std::string version;    // of tapetune, for the record
};

// A Hugging Face folder with everything in it, also the code by which transformers runs a position encoding.
void merge(const MergeInput& input, const MergeOptions& options);

// One GGUF file for llama.cpp, of what is a plain Llama after merging.
void merge_gguf(const MergeInput& input, gguf::TensorType type, const MergeOptions& options);

// The adapter alone, in PEFT's layout.
void export_adapter(const MergeInput& input, const MergeOptions& options);

}  // namespace tapetune
