#include "report/results.h"

#include <algorithm>
#include <charconv>

#include "recipe/recipe.h"
#include "recipe/yaml.h"

namespace tapetune {

namespace {

Json json_of(const Entry& entry) {
  Json losses = Json::array(), held_out = Json::array(), passkey = Json::array(), layers = Json::array();
  for (const StepLoss& each : entry.losses) losses.push_back({each.step, each.loss});
  for (const StepLoss& each : entry.held_out_losses) held_out.push_back({each.step, each.loss});
  for (const RetrievalCell& cell : entry.passkey) {
    passkey.push_back({{"context", cell.context},
                       {"depth", cell.depth},
                       {"trials", cell.trials},
                       {"correct", cell.correct},
                       {"accuracy", cell.accuracy}});
  }
  for (const LayerPicture& layer : entry.layers) {
    layers.push_back({{"attention_distance", layer.distance}, {"position_dot_products", layer.position}});
  }
  Json json{{"name", entry.name}, {"method", entry.method}, {"context", entry.context}};
  json["perplexity"] = Json::array();
  for (const auto& text : entry.perplexity) {
    Json rows = Json::array();
    for (const ContextPerplexity& row : text) {
      rows.push_back({{"context", row.context},
                      {"stride", row.stride},
                      {"windows", row.windows},
                      {"tokens", row.tokens},
                      {"loss", row.loss},
                      {"perplexity", row.perplexity},
                      {"beyond_context", row.context > entry.context}});
    }
    json["perplexity"].push_back(rows);
  }
  json["losses"] = losses;
  json["held_out_losses"] = held_out;
  json["passkey"] = passkey;
  json["layers"] = layers;
  json["settings"] = entry.settings;
  return json;
}

Json number_or_text(const std::string& text) {
  std::int64_t whole = 0;
  double number = 0;
  const char *begin = text.data(), *end = begin + text.size();
  if (const auto [rest, error] = std::from_chars(begin, end, whole); error == std::errc() && rest == end) return whole;
  if (const auto [rest, error] = std::from_chars(begin, end, number); error == std::errc() && rest == end)
    return number;
  return text;
}

// A setting's value in the type that its key has.
Json setting_json(const std::string& key, const std::string& value) {
  if (value == "nothing" || value == "null") return {};
  const auto known =
      std::find_if(recipe_keys().begin(), recipe_keys().end(), [&](const RecipeKey& each) { return each.name == key; });
  const std::string type = known == recipe_keys().end() ? "" : known->type;
  if (type == "true or false") return value == "true";
  const YamlNode node = parse_yaml(value, key);
  if (node.kind == YamlNode::Kind::list) {
    Json list = Json::array();
    for (const YamlNode& item : node.items) list.push_back(number_or_text(item.text));
    return list;
  }
  if (node.kind != YamlNode::Kind::scalar) return value;
  return type == "number" || type == "whole number" ? number_or_text(node.text) : Json(node.text);
}

}  // namespace

Json results_json(const Comparison& c) {
  Json texts = Json::array(), entries = Json::array(), runs = Json::object(), differences = Json::object();
  for (const ComparedText& text : c.texts) {
    texts.push_back({{"name", text.name},
                     {"path", text.path},
                     {"first_token", text.first_token},
                     {"tokens", text.tokens},
                     {"held_out", text.held_out}});
  }
  for (const Entry& entry : c.entries) {
    entries.push_back(json_of(entry));
    if (entry.method == "none") continue;
    runs[entry.name] = {{"trained_parameters", entry.cost.trained_parameters},
                        {"step_seconds", entry.cost.step_seconds},
                        {"tokens_per_s", entry.cost.tokens_per_s},
                        {"peak_mb", entry.cost.peak_mb},
                        {"machines", entry.cost.machines}};
  }
  for (const SettingRow& row : c.differences) {
    Json& values = differences[row.key] = Json::array();
    for (const std::string& value : row.values) values.push_back(setting_json(row.key, value));
  }
  return {{"tapetune", c.version},
          {"base", c.base},
          {"base_hash", c.base_hash},
          {"base_context", c.base_config.longest_context()},
          {"trained_context", c.trained_context},
          {"steps", c.steps},
          {"tokens_per_step", c.tokens_per_step},
          {"seed", c.seed},
          {"protocol", protocol_name(c.protocol)},
          {"contexts", c.contexts},
          {"texts", texts},
          {"entries", entries},
          {"differences", differences},
          {"positions_differ", c.positions.size() > 1},
          {"pictured_tokens", c.pictured},
          {"cost",
           {{"report_made_on", {{"date", c.date}, {"machine", c.machine}, {"threads", c.threads}, {"ranks", c.ranks}}},
            {"runs", runs}}}};
}

}  // namespace tapetune
