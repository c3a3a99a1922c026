// What is this folder? The one answer for every command that takes a model: a checkpoint, a training run, or an
// adapter.
#pragma once

#include <filesystem>
#include <optional>

#include "run/base.h"

namespace tapetune {

struct ModelFolder {
  enum class Kind { none, checkpoint, run, adapter };
  Kind kind = Kind::none;
  std::filesystem::path folder;  // as given
  std::filesystem::path run;     // of RUN, RUN/adapter and RUN/checkpoints/step-N: RUN
};

// Only looks at names of files. A model that lies beside an adapter's files is a checkpoint.
ModelFolder identify(const std::filesystem::path& folder);
// Whether it is RUN itself.
bool is_run(const std::filesystem::path& folder);

// The folder of the base model of a run or an adapter, or a checkpoint itself. Empty where a run drew its weights;
// fails where an adapter's is not here.
std::filesystem::path base_folder(const ModelFolder& found);

// What a run has trained.
struct RunAdapter {
  std::filesystem::path folder;      // of the adapter's files
  std::optional<std::int64_t> step;  // of the checkpoint that it is; none: the run's result
};

// Of RUN: RUN/adapter, or the newest checkpoint of a run that is not finished, with a warning. Of RUN/adapter and
// RUN/checkpoints/step-N: itself. Fails where there is none.
RunAdapter find_adapter(const ModelFolder& found);

struct TrainedModel {
  Recipe recipe;  // with its paths as they were found
  BaseModel base;
  RunAdapter trained;
  AdaptedModel adapted;
};

// dtype: to compute in; the recipe's where it is not given. Fails where the base model changed since the training, or
// with `any_base` warns.
TrainedModel open_run(const ModelFolder& found, std::optional<at::ScalarType> dtype = std::nullopt,
                      at::Device device = at::kCPU, bool any_base = false);
TrainedModel open_run(const std::filesystem::path& folder, std::optional<at::ScalarType> dtype = std::nullopt,
                      at::Device device = at::kCPU, bool any_base = false);

}  // namespace tapetune
