// The files of finished evaluations: what earlier versions stored is read, and what this one stores they would read.
#include "catch.h"
#include "compare/cache.h"
#include "core/json.h"
#include "support.h"

namespace evaluation_cache_test {

using namespace tapetune;
using namespace tapetune::test;

namespace {

template <typename Scores>
Scores never_measured() {
  FAIL("what is stored was evaluated again");
  return {};
}

// Stores scores, checks the file's value, and gives what is read from it.
template <typename Scores>
Scores stored(const EvaluationCache& cache, const TempFolder& folder, const Scores& scores, const std::string& value) {
  const EvaluationKey key{"tape.scores", {{"base", "blake3-1"}, {"tapetune", "1"}}};
  cache.get<Scores>(key, [&] { return scores; });
  const Json file = from_text(read_file(folder / "tape.scores.json"));
  CHECK(to_text(file) == R"({"key":{"base":"blake3-1","tapetune":"1"},"value":)" + value + "}");
  return cache.get<Scores>(key, never_measured<Scores>);
}

}  // namespace

TEST_CASE("evaluations are stored in the format of earlier versions, and read to the bit") {
  World world;
  const auto fresh = [&](auto scores, const std::string& value) {
    const TempFolder folder;
    return stored(EvaluationCache(folder.path(), world), folder, scores, value);
  };
  const ModelSize size = fresh(ModelSize{48, 96}, R"({"context":48,"trained":96})");
  CHECK(size.context == 48);
  CHECK(size.trained_parameters == 96);
  const auto row = fresh(ContextPerplexity{16, 8, 3, 40, 0.1, 1.1051709180756477, {}},
                         R"({"context":16,"stride":8,"windows":3,"tokens":40,"loss":0.1,)"
                         R"("perplexity":1.1051709180756477})");
  CHECK(row.context == 16);
  CHECK(row.stride == 8);
  CHECK(row.windows == 3);
  CHECK(row.tokens == 40);
  CHECK(row.loss == 0.1);
  CHECK(row.perplexity == 1.1051709180756477);
  const auto layers = fresh(std::vector<LayerPicture>{{2.5, {{1, 0.5}, {0.25, 1}}}, {3.5, {}}},
                            R"([{"distance":2.5,"position":[[1.0,0.5],[0.25,1.0]]},{"distance":3.5,"position":[]}])");
  REQUIRE(layers.size() == 2);
  CHECK(layers[0].distance == 2.5);
  CHECK(layers[0].position == std::vector<std::vector<double>>{{1, 0.5}, {0.25, 1}});
  CHECK(layers[1].position.empty());
  const auto cells = fresh(std::vector<RetrievalCell>{{600, 0.5, 4, 1, 0.25}}, "[[600,0.5,4,1,0.25]]");
  REQUIRE(cells.size() == 1);
  CHECK(cells[0].context == 600);
  CHECK(cells[0].depth == 0.5);
  CHECK(cells[0].trials == 4);
  CHECK(cells[0].correct == 1);
  CHECK(cells[0].accuracy == 0.25);
}

TEST_CASE("an evaluation that depends on something else is done again, and replaces what was stored") {
  const TempFolder folder;
  World world;
  const EvaluationCache cache(folder.path(), world);
  const EvaluationKey before{"lora.size", {{"base", "blake3-1"}}}, after{"lora.size", {{"base", "blake3-2"}}};
  cache.get<ModelSize>(before, [] { return ModelSize{16, 1}; });
  CHECK(cache.get<ModelSize>(after, [] { return ModelSize{16, 2}; }).trained_parameters == 2);
  CHECK(cache.get<ModelSize>(after, never_measured<ModelSize>).trained_parameters == 2);
  CHECK(cache.sums(before).string() != cache.sums(after).string());
}

}  // namespace evaluation_cache_test
