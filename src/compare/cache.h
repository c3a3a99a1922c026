// Finished evaluations: a file each in OUT/evaluations, with a key that has all that the result depends on; a different
// key is evaluated again. Rank 0 reads and writes for all.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "compare/comparison.h"
#include "core/json.h"
#include "distributed/world.h"

namespace tapetune {

struct ModelSize {
  std::int64_t context = 0;  // the longest that the model supports
  std::int64_t trained_parameters = 0;
};

// What is stored, as it is in these files, which later versions read.
void to_json(Json& json, const ModelSize& size);
void from_json(const Json& json, ModelSize& size);
void to_json(Json& json, const ContextPerplexity& row);  // without buckets
void from_json(const Json& json, ContextPerplexity& row);
void to_json(Json& json, const LayerPicture& layer);
void from_json(const Json& json, LayerPicture& layer);
void to_json(Json& json, const RetrievalCell& cell);
void from_json(const Json& json, RetrievalCell& cell);

struct EvaluationKey {
  std::string name;  // of its file
  Json depends_on;
};

class EvaluationCache {
 public:
  EvaluationCache(std::filesystem::path folder, World& world) : folder_(std::move(folder)), world_(world) {}

  template <typename Scores>
  Scores get(const EvaluationKey& key, const std::function<Scores()>& measure) const {
    if (const Json known = find(key); !known.is_null()) return known.get<Scores>();
    Scores scores = measure();
    if (world_.is_rank0()) write(key, Json(scores));
    return scores;
  }

  // The partial sums of an evaluation in progress.
  std::filesystem::path sums(const EvaluationKey& key) const;
  // Those of a finished evaluation.
  void remove_sums(const EvaluationKey& key) const;

 private:
  std::filesystem::path file(const EvaluationKey& key) const { return folder_ / (key.name + ".json"); }
  Json find(const EvaluationKey& key) const;  // null: not evaluated yet
  void write(const EvaluationKey& key, const Json& value) const;

  std::filesystem::path folder_;
  World& world_;
};

}  // namespace tapetune
