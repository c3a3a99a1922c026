#include "compare/positions.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <tuple>

#include "core/shell.h"

namespace tapetune {

namespace {

bool has_scaling(const Recipe& recipe) { return recipe.method.scaling || recipe.method.factor; }

RopeType scaling_type(const Recipe& recipe) { return recipe.method.scaling.value_or(RopeType::linear); }

bool is_scaled(const Recipe& recipe, const RopeConfig& base) {
  return (has_scaling(recipe) ? scaling_type(recipe) : base.type) != RopeType::standard;
}

// None where it is the base model's, whether the recipe writes it or not.
std::optional<double> other_theta(const Recipe& recipe, const RopeConfig& base) {
  return recipe.method.theta && *recipe.method.theta != base.theta ? recipe.method.theta : std::nullopt;
}

bool thetas_differ(const std::vector<NamedRecipe>& recipes, const RopeConfig& base) {
  std::vector<std::optional<double>> found;
  for (const NamedRecipe& each : recipes) {
    if (!theta_is_method(each.recipe)) found.push_back(other_theta(each.recipe, base));
  }
  return std::any_of(found.begin(), found.end(), [&](const auto& theta) { return theta != found.front(); });
}

std::string_view scaling_name(const Recipe& recipe) {
  if (!recipe.method.scaling) return "null";
  return *recipe.method.scaling == RopeType::standard ? "none" : rope_type_name(*recipe.method.scaling);
}

std::string scaling_text(const Recipe& recipe, const RopeConfig& base) {
  if (!is_scaled(recipe, base)) return "no scaling";
  if (!has_scaling(recipe)) return "the base model's scaling";
  return fmt::format("{} scaling, factor {:g}", rope_type_name(scaling_type(recipe)),
                     recipe.method.factor.value_or(1.0));
}

}  // namespace

bool theta_is_method(const Recipe& recipe) { return parse_method(recipe.method.preset, {}).theta.has_value(); }

bool positions_are_method(const Recipe& recipe, const RopeConfig& base) {
  return theta_is_method(recipe) && !is_scaled(recipe, base);
}

std::vector<PositionGroup> position_groups(const std::vector<NamedRecipe>& recipes, const RopeConfig& base) {
  struct Kind {
    std::string scaling;
    std::optional<double> theta;
  };
  std::vector<Kind> kinds;
  std::vector<PositionGroup> groups;
  // Recipes whose theta is their method come last, to join any group with their scaling.
  for (const bool any_theta : {false, true}) {
    for (const auto& [name, recipe] : recipes) {
      if (theta_is_method(recipe) != any_theta || positions_are_method(recipe, base)) continue;
      const Kind kind{scaling_text(recipe, base), any_theta ? std::nullopt : other_theta(recipe, base)};
      const auto same = std::find_if(kinds.begin(), kinds.end(), [&](const Kind& one) {
        return one.scaling == kind.scaling && (any_theta || one.theta == kind.theta);
      });
      if (same != kinds.end()) {
        groups[static_cast<std::size_t>(same - kinds.begin())].recipes.push_back(name);
        continue;
      }
      groups.push_back({kind.theta ? fmt::format("{}, theta {:g}", kind.scaling, *kind.theta) : kind.scaling, {name}});
      kinds.push_back(kind);
    }
  }
  return groups;
}

const NamedRecipe& best_positions(const std::vector<NamedRecipe>& recipes, const Comparison& result) {
  const std::size_t context = headline_context(result);
  const auto rank = [&](const NamedRecipe& recipe) {
    const Entry& entry = result.entries[static_cast<std::size_t>(&recipe - recipes.data()) + 1];  // the base is first
    return std::tuple(positions_are_method(recipe.recipe, result.base_config.rope), theta_is_method(recipe.recipe),
                      entry.perplexity[0][context].perplexity);
  };
  return *std::min_element(recipes.begin(), recipes.end(),
                           [&](const NamedRecipe& a, const NamedRecipe& b) { return rank(a) < rank(b); });
}

std::string equal_positions_command(const std::vector<NamedRecipe>& recipes, const NamedRecipe& like,
                                    const RopeConfig& base, const CompareOptions& options) {
  const auto line = [](const std::vector<std::string>& words) {
    std::vector<std::string> quoted;
    quoted.reserve(words.size());
    for (const std::string& word : words) quoted.push_back(shell_word(word));
    return fmt::format("{}", fmt::join(quoted, " "));
  };
  const bool set_theta = thetas_differ(recipes, base);
  std::vector<std::string> compared{"tapetune", "compare"};
  for (std::size_t i = 0; i < recipes.size(); ++i) {
    const Recipe& recipe = recipes[i].recipe;
    const bool loses_method = positions_are_method(recipe, base) || (set_theta && theta_is_method(recipe));
    if (!loses_method) compared.push_back(options.recipe_words.at(i));
  }
  const MethodOptions& method = like.recipe.method;
  std::vector<std::string> settings = options.settings;
  settings.push_back(fmt::format("positions.scaling={}", scaling_name(like.recipe)));
  settings.push_back(method.factor ? fmt::format("positions.factor={}", *method.factor) : "positions.factor=null");
  if (set_theta) {
    const auto theta = other_theta(like.recipe, base);
    settings.push_back(theta ? fmt::format("positions.theta={}", *theta) : "positions.theta=null");
  }
  const std::string out = (options.out / "").parent_path().string() + "-equal-positions";
  std::vector<std::string> places{"--runs", out + "/runs", "--out", out};
  if (!options.eval_file.empty()) places.insert(places.end(), {"--eval", options.eval_file});
  return fmt::format("{} \\\n  {} \\\n  {}", line(compared), line(settings), line(places));
}

}  // namespace tapetune
