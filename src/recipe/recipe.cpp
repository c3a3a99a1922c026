#include "recipe/recipe.h"

#include <cmath>

#include "recipe/schema.h"

namespace tapetune {

using namespace schema;

std::span<const RecipeKey> recipe_keys() {
  static const std::vector<RecipeKey> keys = [] {
    std::vector<RecipeKey> all;
    for (const Field& field : fields()) {
      all.push_back(field.key);
    }
    return all;
  }();
  return keys;
}

std::string recipe_yaml(const Recipe& recipe, std::span<const std::string> comments) {
  Recipe copy = recipe;
  std::string text, section;
  for (const std::string& comment : comments) text += "# " + comment + "\n";
  for (const Field& field : fields()) {
    const std::string value = field.get(copy);
    if (value.empty()) continue;
    const std::string own = section_of(field.key.name);
    if (!own.empty() && own != section) text += own + ":\n";
    section = own;
    text += fmt::format("{}{}: {}\n", own.empty() ? "" : "  ", last_of(field.key.name), value);
  }
  return text;
}

std::vector<RecipeDifference> differences(const Recipe& before, const Recipe& after) {
  std::vector<RecipeDifference> list;
  Recipe first = before, second = after;
  // Without an end to steer for, more steps go on where fewer ended.
  const bool endless = before.schedule.kind == "constant" && after.schedule.kind == "constant";
  for (const Field& field : fields()) {
    const std::string a = field.get(first), b = field.get(second);
    if (a == b) continue;
    const bool affects_result = field.key.affects_result && !(endless && field.key.name == "steps");
    list.push_back({field.key.name, a.empty() ? "nothing" : a, b.empty() ? "nothing" : b, affects_result});
  }
  return list;
}

ModelConfig random_model_config(const Recipe& recipe) {
  const RandomModel& model = recipe.init.value();
  ModelConfig config;
  config.vocab_size = model.vocab;
  config.hidden_size = model.hidden;
  config.intermediate_size = model.ffn;
  config.layers = model.layers;
  config.heads = model.heads;
  config.kv_heads = model.kv_heads;
  config.head_dim = model.head_dim;
  config.rms_norm_eps = model.norm_eps;
  config.tied_embeddings = model.tied;
  // The method's scaling stretches the context to the recipe's.
  config.context =
      static_cast<std::int64_t>(std::ceil(static_cast<double>(recipe.context) / recipe.method.factor.value_or(1.0)));
  return config;
}

}  // namespace tapetune
