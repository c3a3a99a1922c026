#include "cli/usage.h"

#include <CLI/CLI.hpp>

#include "core/nearest.h"
#include "recipe/recipe.h"

namespace tapetune::cli {

namespace {

bool is_option(const std::string& word) { return word.size() > 1 && word.front() == '-' && word != "--"; }

std::vector<const CLI::App*> commands_of(const CLI::App& app) {
  return app.get_subcommands([](const CLI::App* sub) { return !sub->get_name().empty(); });  // no option groups
}

std::string did_you_mean(const std::string& meant) {
  return meant.empty() ? "" : fmt::format(" (did you mean {}?)", meant);
}

std::string see_help(const CLI::App& command) { return fmt::format("; see {} --help", command_name(command)); }

// Among the commands of `app`, or those within them: "perplexity" meant "eval perplexity".
std::string nearest_command(const CLI::App& app, const std::string& word) {
  std::vector<std::string> names;
  for (const CLI::App* command : commands_of(app)) {
    names.push_back(command->get_name());
    for (const CLI::App* inner : commands_of(*command)) {
      if (inner->get_name() == word) return command->get_name() + " " + word;
    }
  }
  return nearest(word, std::vector<std::string_view>(names.begin(), names.end()));
}

UsageError not_a_command(const CLI::App& app, const std::string& word) {
  const std::string of = app.get_parent() == nullptr ? "" : " of " + command_name(app);
  return UsageError(
      fmt::format("\"{}\" is not a command{}{}{}", word, of, did_you_mean(nearest_command(app, word)), see_help(app)));
}

// The innermost command that was recognised.
const CLI::App& reached(const CLI::App& app) {
  for (const CLI::App* command : app.get_subcommands()) {
    if (!command->get_name().empty()) return reached(*command);
  }
  return app;
}

bool takes_settings(const CLI::App& command) {
  const std::string name = command.get_name();
  return name == "train" || name == "plan" || name == "compare";
}

// "optimizer.lr" for "lr"; empty where no key, or more than one, ends so.
std::string recipe_key(std::string word) {
  std::replace(word.begin(), word.end(), '-', '_');
  std::vector<std::string> found;
  for (const RecipeKey& key : recipe_keys()) {
    if (key.name == word) return word;
    if (key.name.ends_with("." + word)) found.push_back(key.name);
  }
  return found.size() == 1 ? found.front() : "";
}

std::string nearest_option(const CLI::App& command, const std::string& word) {
  std::vector<std::string> names;
  const auto add = [&](const CLI::App& app) {
    for (const CLI::Option* option : app.get_options()) {
      for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
    }
  };
  add(command);
  for (const CLI::App* group : command.get_subcommands([](const CLI::App* sub) { return sub->get_name().empty(); })) {
    add(*group);
  }
  const std::string meant = nearest(word, std::vector<std::string_view>(names.begin(), names.end()));
  // Two edits make one short option of another: the first letter must be right.
  return meant.substr(0, 3) == word.substr(0, 3) ? meant : "";
}

// An option that the command does not have.
std::string about_option(const CLI::App& command, const std::string& word, const std::vector<std::string>& words) {
  const std::size_t equals = word.find('=');
  const std::size_t name = word.find_first_not_of('-');
  if (name == equals) {  // no name at all
    return fmt::format("{} is not an option of {}", word, command_name(command));
  }
  const std::string option = word.substr(0, equals);
  const std::string key = takes_settings(command) ? recipe_key(option.substr(name)) : "";
  if (key.empty()) {
    return fmt::format("{} is not an option of {}{}", option, command_name(command),
                       did_you_mean(nearest_option(command, option)));
  }
  std::string value = equals == std::string::npos ? "VALUE" : word.substr(equals + 1);
  const auto at = std::find(words.begin(), words.end(), word);
  if (equals == std::string::npos && at != words.end() && at + 1 != words.end() && !is_option(*(at + 1))) {
    value = *(at + 1);
  }
  return fmt::format("{} is a setting of the recipe, not an option: write {}={}", option, key, value);
}

}  // namespace

std::string command_name(const CLI::App& command) {
  const CLI::App* parent = command.get_parent();
  return parent == nullptr ? command.get_name() : command_name(*parent) + " " + command.get_name();
}

const CLI::App& find_command(const CLI::App& app, const std::vector<std::string>& words) {
  const CLI::App* found = &app;
  for (const std::string& word : words) {
    const std::vector<const CLI::App*> commands = commands_of(*found);
    if (commands.empty()) break;
    if (is_option(word)) continue;
    const auto at =
        std::find_if(commands.begin(), commands.end(), [&](const CLI::App* one) { return one->get_name() == word; });
    if (at == commands.end()) throw not_a_command(*found, word);
    found = *at;
  }
  return *found;
}

std::vector<std::string> expand_help(const CLI::App& app, std::vector<std::string> words) {
  const auto first = std::find_if_not(words.begin(), words.end(), is_option);
  if (first == words.end() || *first != "help") return words;
  words.erase(words.begin(), first + 1);
  find_command(app, words);
  words.emplace_back("--help");
  return words;
}

UsageError explain_usage(const CLI::App& app, const CLI::ParseError& error, const std::vector<std::string>& words) {
  const CLI::App& command = reached(app);
  const std::vector<std::string> left = app.remaining(/*recurse=*/true);
  const auto unknown = std::find_if(left.begin(), left.end(), is_option);
  if (!commands_of(command).empty()) {  // a command is needed, but there is none
    find_command(app, words);
    if (unknown != left.end()) return UsageError(about_option(command, *unknown, words) + see_help(command));
    std::vector<std::string> names;
    for (const CLI::App* one : commands_of(command)) names.push_back(one->get_name());
    return UsageError(
        fmt::format("{} needs a command: {}{}", command_name(command), fmt::join(names, ", "), see_help(command)));
  }
  std::string text = error.what();
  const bool dashes = std::find(words.begin(), words.end(), "--") != words.end();
  if (command.get_name() == "launch" && !dashes) {
    text += "; put -- before the command: tapetune launch --nproc 2 -- train ...";
  } else if (unknown != left.end()) {
    text = about_option(command, *unknown, words);
  }
  return UsageError(text + see_help(command));
}

}  // namespace tapetune::cli
