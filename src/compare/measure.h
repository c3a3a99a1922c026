// Evaluates models all in the same way; what was evaluated before is read from the cache.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "compare/cache.h"
#include "compare/comparison.h"
#include "compare/eval_file.h"
#include "compare/target.h"
#include "compare/texts.h"
#include "distributed/world.h"
#include "model/llama.h"

namespace tapetune {

// What all models are measured on.
struct EvalData {
  std::filesystem::path tokenizer;  // folder
  std::vector<EvalText> texts;
  std::vector<std::int64_t> contexts;
};

// Fails where a text is too short for a context, a stride does not fit, or a passkey prompt does not. model: the base.
void require_measurable(const EvalPlan& plan, const EvalData& data, const Llama& model);

class Measurements {
 public:
  // plan and data must outlive it. cache: the folder of finished evaluations.
  Measurements(const EvalPlan& plan, const EvalData& data, std::string version, const std::filesystem::path& cache,
               World& world);

  // The tokens between which positions are pictured.
  const std::vector<std::int64_t>& pictured() const { return pictured_; }
  // Adds a model's size and scores to its entry.
  void measure(EvalTarget& target, Entry& entry) const;

 private:
  ModelSize size(EvalTarget& target) const;
  ContextPerplexity perplexity(EvalTarget& target, std::size_t text, std::size_t context_index) const;
  std::vector<LayerPicture> layers(EvalTarget& target) const;
  std::vector<RetrievalCell> passkey(EvalTarget& target) const;
  EvaluationKey key(const EvalTarget& target, const std::string& what) const;

  const EvalPlan& plan_;
  const EvalData& data_;
  std::string version_;
  World& world_;
  EvaluationCache cache_;
  std::vector<std::int64_t> tokens_, pictured_;
};

}  // namespace tapetune
