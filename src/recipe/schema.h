// The schema of a recipe: one table of keys, each with what it does to a recipe. Private to src/recipe.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "recipe/recipe.h"
#include "recipe/yaml.h"

namespace tapetune::schema {

// Something wrong, said about a place in the file.
using Report = std::function<void(const YamlNode& at, const std::string& text)>;

struct Field {
  RecipeKey key;
  std::function<void(Recipe&, const YamlNode&, const Report&)> set;
  std::function<std::string(Recipe&)> get;  // as YAML; empty: this recipe has no such key
  bool needed = false;
  bool optional = false;  // null is a value
};

// In the order in which a recipe is written; the keys of a section are together.
const std::vector<Field>& fields();
const Field* find_field(std::string_view name);

// "optimizer.lr" is the key "lr" of the section "optimizer"; a key at the top level has none.
std::string section_of(std::string_view name);
std::string_view last_of(std::string_view name);
bool is_section(std::string_view name);
// The keys of a section, or what may stand at the top level.
std::vector<std::string_view> names_in(std::string_view section);

RandomModel& random_model(Recipe& recipe);  // which becomes one that trains from scratch

// Parts of messages.
std::string shortened(const std::string& text);
std::string shown(const YamlNode& node);
std::string must_be(std::string_view name, const std::string& what, const YamlNode& node);

}  // namespace tapetune::schema
