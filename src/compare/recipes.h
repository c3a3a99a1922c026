// The recipes of a comparison: reading them, and whether they may be compared.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "compare/comparison.h"
#include "distributed/world.h"
#include "recipe/recipe.h"

namespace tapetune {

struct NamedRecipe {
  std::string name;
  Recipe recipe;
};

// Reads files or shipped recipes, with the same settings over all of them; each is named after its file. `runs`, if
// given, replaces the run folders that the recipes name.
std::vector<NamedRecipe> read_recipes(const std::vector<std::string>& recipes, const std::vector<std::string>& settings,
                                      const std::filesystem::path& runs = {});

// The recipes with the hash of their base model, which is the same for all. Fails where they start from different base
// models, train on different data, or would train in one folder or in somebody else's.
std::vector<NamedRecipe> require_comparable(const std::vector<NamedRecipe>& recipes, World& world);

// Their differences in what affects a result.
std::vector<SettingRow> differing_settings(const std::vector<NamedRecipe>& recipes);

}  // namespace tapetune
