#include "compare/recipes.h"

#include <algorithm>
#include <map>
#include <set>

#include "adapters/checkpoints.h"
#include "core/error.h"
#include "recipe/shipped.h"
#include "run/inputs.h"
#include "run/run_folder.h"

namespace tapetune {

namespace {

namespace fs = std::filesystem;

void require_own_folders(const std::vector<NamedRecipe>& recipes) {
  std::map<std::string, std::string> owners;
  for (const NamedRecipe& each : recipes) {
    const auto [at, added] = owners.emplace(fs::absolute(each.recipe.run).lexically_normal().string(), each.name);
    if (!added) {
      fail("compare", "{} and {} have the same run folder, {}; give --runs DIR, which gets a folder for each recipe.",
           at->second, each.name, each.recipe.run);
    }
  }
}

std::string base_of(const Recipe& recipe, std::map<std::string, std::string>& hashes, World& world) {
  if (recipe.init) return "";
  std::string& hash = hashes[recipe.model];
  if (hash.empty()) {
    hash = world.broadcast(world.is_rank0() ? hash_weights(open_checkpoint(recipe.model)) : "");
  }
  return hash;
}

// Base models are the same if their weights are, wherever their folders are.
void add_base_hashes(std::vector<NamedRecipe>& recipes, World& world) {
  std::map<std::string, std::string> hashes;
  for (NamedRecipe& each : recipes) {
    const std::string hash = base_of(each.recipe, hashes, world);
    if (!each.recipe.model_hash.empty() && each.recipe.model_hash != hash) {
      fail("compare",
           "{}: the weights in {} have the hash {}, but the recipe's model_hash is {}; give the right model with "
           "model=DIR.",
           each.name, each.recipe.model, hash, each.recipe.model_hash);
    }
    each.recipe.model_hash = hash;
  }
}

// The keys that decide the order of the data and its split.
bool shared_key(std::string_view key) {
  return key == "data" || key == "context" || key == "batch" || key == "seed" || key == "held_out";
}

void require_same_start(const std::vector<NamedRecipe>& recipes) {
  const NamedRecipe& first = recipes.front();
  for (const NamedRecipe& other : recipes) {
    const auto named = [](const Recipe& r) { return r.init ? std::string("random weights") : r.model; };
    std::string keys;
    for (const RecipeDifference& d : differences(first.recipe, other.recipe)) {
      if (d.key == "model_hash" || d.key.starts_with("model.")) {
        fail("compare",
             "{} and {} start from different base models, {} and {} ({}: {} and {}), so their results are not "
             "comparable; give all of them the same model=DIR, or run a comparison for each base model.",
             first.name, other.name, named(first.recipe), named(other.recipe), d.key, d.before, d.after);
      }
      if (shared_key(d.key)) {
        keys += fmt::format("{}{} ({} and {})", keys.empty() ? "" : ", ", d.key, d.before, d.after);
      }
    }
    if (!keys.empty()) {
      fail("compare", "{} and {} differ in {}, so they would train on different data; set it for all with key=value.",
           first.name, other.name, keys);
    }
  }
}

}  // namespace

std::vector<NamedRecipe> read_recipes(const std::vector<std::string>& recipes, const std::vector<std::string>& settings,
                                      const fs::path& runs) {
  if (recipes.empty()) fail("compare", "no recipe given; name one or several before the key=value settings.");
  std::vector<NamedRecipe> named;
  std::set<std::string> names;
  for (const std::string& each : recipes) {
    const fs::path file = find_recipe(each);
    std::string name = file.stem().string();
    // "...yaml" would train in the folder above RUNS.
    if (name.starts_with('.')) fail("compare", "{}: a recipe's name must not begin with a dot; rename it.", each);
    if (!names.insert(name).second) {  // a/tape and b/tape
      name = fmt::format("{}-{}", file.parent_path().filename().string(), name);
      if (!names.insert(name).second)
        fail("compare", "{}: given twice, or another recipe has the same name; rename a copy.", each);
    }
    named.push_back({name, read_recipe(file, settings)});
    if (!runs.empty()) named.back().recipe.run = (runs / name).string();
  }
  return named;
}

std::vector<NamedRecipe> require_comparable(const std::vector<NamedRecipe>& given, World& world) {
  require_own_folders(given);
  for (const NamedRecipe& each : given) {
    if (world.is_rank0()) RunFolder::require_ours(each.recipe.run);
  }
  std::vector<NamedRecipe> recipes = given;
  add_base_hashes(recipes, world);
  require_same_start(recipes);
  return recipes;
}

std::vector<SettingRow> differing_settings(const std::vector<NamedRecipe>& recipes) {
  std::vector<SettingRow> rows;
  for (const RecipeKey& key : recipe_keys()) {
    if (!key.affects_result || key.name == "model" || key.name == "model_hash") continue;
    SettingRow row{key.name, std::vector<std::string>(recipes.size())};
    bool differs = false;
    for (std::size_t i = 1; i < recipes.size(); ++i) {
      for (const RecipeDifference& d : differences(recipes[0].recipe, recipes[i].recipe)) {
        if (d.key != key.name) continue;
        if (!differs) std::fill(row.values.begin(), row.values.end(), d.before);
        row.values[i] = d.after;
        differs = true;
      }
    }
    if (differs) rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace tapetune
