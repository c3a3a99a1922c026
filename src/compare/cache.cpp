#include "compare/cache.h"

#include <fmt/format.h>

#include "core/file.h"
#include "distributed/rendezvous.h"
#include "hf/hash.h"

namespace tapetune {

namespace {

namespace fs = std::filesystem;

Json read_evaluation(const fs::path& file, const Json& depends_on) {
  std::error_code status;
  if (!fs::exists(file, status)) return {};
  const Json json = parse_json(read_text(file), "compare", file.string());
  const bool same = json.is_object() && json.value("key", Json()) == depends_on && json.contains("value");
  return same ? json["value"] : Json();
}

}  // namespace

void to_json(Json& json, const ModelSize& size) {
  json = {{"context", size.context}, {"trained", size.trained_parameters}};
}

void from_json(const Json& json, ModelSize& size) { size = {json.at("context"), json.at("trained")}; }

void to_json(Json& json, const ContextPerplexity& row) {
  json = {{"context", row.context}, {"stride", row.stride}, {"windows", row.windows},
          {"tokens", row.tokens},   {"loss", row.loss},     {"perplexity", row.perplexity}};
}

void from_json(const Json& json, ContextPerplexity& row) {
  row = {json.at("context"),
         json.at("stride"),
         json.at("windows"),
         json.at("tokens"),
         json.at("loss"),
         json.at("perplexity"),
         {}};
}

void to_json(Json& json, const LayerPicture& layer) {
  json = {{"distance", layer.distance}, {"position", layer.position}};
}

void from_json(const Json& json, LayerPicture& layer) { layer = {json.at("distance"), json.at("position")}; }

void to_json(Json& json, const RetrievalCell& cell) {
  json = Json::array({cell.context, cell.depth, cell.trials, cell.correct, cell.accuracy});
}

void from_json(const Json& json, RetrievalCell& cell) {
  cell = {json.at(0), json.at(1), json.at(2), json.at(3), json.at(4)};
}

fs::path EvaluationCache::sums(const EvaluationKey& key) const {
  Hasher hasher;
  hasher.add(to_text(key.depends_on));
  return folder_ / fmt::format("{}.{}.sums", key.name, hasher.hex().substr(0, 12));
}

void EvaluationCache::remove_sums(const EvaluationKey& key) const {
  std::error_code ignored;
  if (world_.is_rank0()) fs::remove(sums(key), ignored);
}

Json EvaluationCache::find(const EvaluationKey& key) const {
  const std::string known = world_.is_rank0() ? to_text(read_evaluation(file(key), key.depends_on)) : "";
  return json_of_rank(0, world_.broadcast(known));
}

void EvaluationCache::write(const EvaluationKey& key, const Json& value) const {
  WholeFile out(file(key), /*replace=*/true);
  out.write(to_text(Json{{"key", key.depends_on}, {"value", value}}, 1) + "\n");
  out.commit();
}

}  // namespace tapetune
