#include <CLI/CLI.hpp>

#include "cli/options.h"
#include "cli/verbs.h"
#include "core/digits.h"
#include "core/error.h"
#include "core/file.h"
#include "core/json.h"
#include "core/output.h"
#include "recipe/recipe.h"
#include "recipe/shipped.h"

namespace tapetune::cli {

namespace {

void list() {
  std::size_t widest = 0;
  const std::vector<ShippedRecipe> all = list_recipes();
  for (const ShippedRecipe& each : all) widest = std::max(widest, each.name.size());
  for (const ShippedRecipe& each : all) print_out("{:{}}  {}\n", each.name, widest, each.summary);
}

void copy(const std::string& name, const std::string& to, bool force) {
  const std::filesystem::path from = find_recipe(name);
  std::filesystem::path target = to;
  if (std::filesystem::is_directory(target)) target /= from.filename();
  require_writable(target, force);
  WholeFile file(target, force);
  file.write(read_text(from));
  file.commit();
  print_out("{}\n", target.string());
}

void validate(const std::vector<std::string>& words) {
  const auto [files, settings] = split_words(words);
  std::vector<std::string> wrong;
  if (files.empty()) fail("recipe", "no recipe to validate; name one before the settings.");
  std::string right;
  for (const std::string& name : files) {
    try {
      const Recipe recipe = read_recipe(find_recipe(name), settings);
      right += fmt::format("{}: ok ({}, {} of {} x {} tokens)\n", name, recipe.method.name(),
                           counted(recipe.steps, "step"), recipe.batch, recipe.context);
    } catch (const Error& error) {
      wrong.emplace_back(error.what());
    }
  }
  print_out("{}", right);
  if (!wrong.empty()) throw Error(fmt::format("{}", fmt::join(wrong, "\n")));
}

void keys(bool json) {
  if (json) {
    Json all = Json::array();
    for (const RecipeKey& key : recipe_keys()) {
      all.push_back({{"key", key.name},
                     {"type", key.type},
                     {"default", key.fallback.empty() ? Json() : Json(key.fallback)},
                     {"rule", key.rule},
                     {"help", key.help},
                     {"decides", key.affects_result}});
    }
    print_out("{}\n", to_text(all, 2));
    return;
  }
  std::size_t name = 0, type = 0, fallback = 0;
  const auto shown = [](const RecipeKey& key) { return key.fallback.empty() ? "required" : key.fallback; };
  for (const RecipeKey& key : recipe_keys()) {
    name = std::max(name, key.name.size());
    type = std::max(type, key.type.size());
    fallback = std::max(fallback, shown(key).size());
  }
  print_out("{:{}}  {:{}}  {:{}}  {}\n", "key", name, "type", type, "default", fallback, "help");
  for (const RecipeKey& key : recipe_keys()) {
    print_out("{:{}}  {:{}}  {:{}}  {}{}\n", key.name, name, key.type, type, shown(key), fallback, key.help,
              key.rule.empty() ? "" : fmt::format(" ({})", key.rule));
  }
}

}  // namespace

void add_recipes(CLI::App& app) {
  CLI::App* verb = app.add_subcommand("recipes", "List, show, copy and check recipes");
  verb->require_subcommand(1);
  verb->footer("example: tapetune recipes show llama2-7b-8k/tape steps=100");

  CLI::App* ls = verb->add_subcommand("ls", "List the shipped recipes");
  ls->footer("example: tapetune recipes ls");
  ls->callback([] { list(); });

  struct Options {
    std::string name, to;
    std::vector<std::string> words;
    bool force = false, json = false;
  };
  const auto options = std::make_shared<Options>();
  CLI::App* show = verb->add_subcommand("show", "Show a recipe as it would run: every key, with settings applied");
  show->add_option("recipe", options->name, "A file, or the name of a shipped recipe")->required();
  show->add_option("settings", options->words, "key=value, as steps=100 or optimizer.lr=1e-4");
  show->footer("example: tapetune recipes show llama2-7b-8k/tape steps=100 optimizer.lr=1e-4");
  show->callback([options] { write_text(recipe_yaml(read_recipe(find_recipe(options->name), options->words))); });

  CLI::App* cp = verb->add_subcommand("cp", "Copy a recipe, to change it");
  cp->add_option("recipe", options->name, "A file, or the name of a shipped recipe")->required();
  cp->add_option("to", options->to, "The new file, or a folder")->required();
  cp->add_flag("--force", options->force, "Replace an existing file");
  cp->footer("example: tapetune recipes cp llama2-7b-8k/tape mine.yaml");
  cp->callback([options] { copy(options->name, options->to, options->force); });

  CLI::App* check = verb->add_subcommand("validate", "Check recipes; every mistake is reported, one per line");
  check->add_option("recipes", options->words, "Files or names of shipped recipes, then key=value settings")
      ->required();
  check->footer("example: tapetune recipes validate mine.yaml steps=100");
  check->callback([options] { validate(options->words); });

  CLI::App* schema = verb->add_subcommand("keys", "List every key of a recipe: type, default, rule");
  schema->add_flag("--json", options->json, "The same as JSON");
  schema->footer("example: tapetune recipes keys");
  schema->callback([options] { keys(options->json); });
}

}  // namespace tapetune::cli
