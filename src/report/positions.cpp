#include "report/positions.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "core/shell.h"

namespace tapetune {

namespace {

std::string theta_of(const Recipe& recipe) {
  return recipe.method.theta ? fmt::format("{}", *recipe.method.theta) : "null";
}

bool thetas_differ(const std::vector<NamedRecipe>& recipes) {
  std::vector<std::string> found;
  for (const NamedRecipe& each : recipes) {
    if (!positions_are_method(each.recipe)) found.push_back(theta_of(each.recipe));
  }
  return std::any_of(found.begin(), found.end(), [&](const std::string& theta) { return theta != found.front(); });
}

std::string_view scaling_name(const Recipe& recipe) {
  if (!recipe.method.scaling) return "null";
  return *recipe.method.scaling == RopeType::standard ? "none" : rope_type_name(*recipe.method.scaling);
}

std::string scaling_text(const Recipe& recipe) {
  const MethodOptions& method = recipe.method;
  const bool scaled = method.scaling && *method.scaling != RopeType::standard;
  std::string text = scaled           ? fmt::format("{} scaling, factor {:g}", scaling_name(recipe), *method.factor)
                     : method.scaling ? "no scaling"
                                      : "the base model's";
  if (method.theta) text += fmt::format(", theta {:g}", *method.theta);
  return text;
}

}  // namespace

bool positions_are_method(const Recipe& recipe) { return recipe.method.method == "theta-scaling"; }

std::vector<PositionGroup> position_groups(const std::vector<NamedRecipe>& recipes) {
  std::vector<PositionGroup> groups;
  for (const NamedRecipe& each : recipes) {
    if (positions_are_method(each.recipe)) continue;
    const std::string settings = scaling_text(each.recipe);
    const auto same = std::find_if(groups.begin(), groups.end(),
                                   [&](const PositionGroup& group) { return group.settings == settings; });
    if (same == groups.end()) {
      groups.push_back({settings, {each.name}});
    } else {
      same->recipes.push_back(each.name);
    }
  }
  return groups;
}

std::string equal_positions_command(const std::vector<NamedRecipe>& recipes, const NamedRecipe& like,
                                    const CompareOptions& options) {
  const auto line = [](const std::vector<std::string>& words) {
    std::vector<std::string> quoted;
    quoted.reserve(words.size());
    for (const std::string& word : words) quoted.push_back(shell_word(word));
    return fmt::format("{}", fmt::join(quoted, " "));
  };
  const bool theta = thetas_differ(recipes);
  std::vector<std::string> compared{"tapetune", "compare"};
  for (std::size_t i = 0; i < recipes.size(); ++i) {
    if (!positions_are_method(recipes[i].recipe)) compared.push_back(options.recipe_words.at(i));
  }
  const MethodOptions& method = like.recipe.method;
  std::vector<std::string> settings = options.settings;
  settings.push_back(fmt::format("positions.scaling={}", scaling_name(like.recipe)));
  settings.push_back(method.factor ? fmt::format("positions.factor={}", *method.factor) : "positions.factor=null");
  if (theta) settings.push_back("positions.theta=" + theta_of(like.recipe));
  const std::string out = (options.out / "").parent_path().string() + "-equal-positions";
  std::vector<std::string> places{"--runs", out + "/runs", "--out", out};
  if (!options.eval_file.empty()) places.insert(places.end(), {"--eval", options.eval_file});
  return fmt::format("{} \\\n  {} \\\n  {}", line(compared), line(settings), line(places));
}

}  // namespace tapetune
