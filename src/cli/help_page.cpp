#include "cli/help_page.h"

#include <fmt/format.h>

#include <string_view>
#include <vector>

namespace tapetune::cli {

namespace {

constexpr std::size_t page_width = 80, name_column = 2, text_column = 26;

// What a line may not be broken within: words, quoted words, and an option with its value.
std::vector<std::string> words_of(std::string_view text) {
  std::vector<std::string> words;
  std::string word;
  bool quoted = false;
  for (const char c : text) {
    if (c == '\'' && (quoted || word.empty())) quoted = !quoted;
    if (c == ' ' && !quoted) {
      if (!word.empty()) words.push_back(std::move(word));
      word.clear();
    } else {
      word += c;
    }
  }
  if (!word.empty()) words.push_back(std::move(word));
  for (std::size_t i = 0; i + 1 < words.size(); ++i) {
    if (!words[i].starts_with("--") || words[i] == "--" || words[i + 1].starts_with("-")) continue;
    words[i] += " " + words[i + 1];
    words.erase(words.begin() + static_cast<std::ptrdiff_t>(i) + 1);
  }
  return words;
}

// Columns on the screen: UTF-8's continuation bytes take none.
std::size_t columns(std::string_view text) {
  std::size_t count = 0;
  for (const char c : text) count += (static_cast<unsigned char>(c) & 0xC0) != 0x80 ? 1 : 0;
  return count;
}

// The first line begins at column `at`, the others at `indent`; `end` closes every line but the last.
std::string wrapped(std::string_view text, std::size_t at, std::size_t indent, std::string_view end = "") {
  std::string out;
  bool first = true;
  for (const std::string& word : words_of(text)) {
    if (!first && at + 1 + columns(word) + end.size() > page_width) {
      out += fmt::format("{}\n{:{}}", end, "", indent);
      at = indent;
      first = true;
    }
    if (!first) out += ' ';
    at += columns(word) + (first ? 0 : 1);
    out += word;
    first = false;
  }
  return out + "\n";
}

std::string row(const std::string& name, const std::string& text) {
  std::string line = fmt::format("{:{}}{}", "", name_column, name);
  const std::size_t width = columns(line);
  line +=
      width + 2 > text_column ? fmt::format("\n{:{}}", "", text_column) : fmt::format("{:{}}", "", text_column - width);
  return line + wrapped(text, text_column, text_column);
}

// " FILE" behind the name of an option; nothing behind a flag.
std::string value_of(const CLI::Option& option) {
  if (option.get_type_size() == 0) return "";
  const std::string type = option.get_type_name();  // "INT:POSITIVE": with the rule, which the text tells
  return type.empty() ? "" : " " + type.substr(0, type.find(':'));
}

std::string positional_name(const CLI::Option& option) {
  if (!option.get_option_text().empty()) return option.get_option_text();
  return option.get_name(true, false) + (option.get_expected_max() > 1 ? "..." : "");
}

std::string option_row(const CLI::Option& option) {
  std::string text = option.get_description();
  if (!option.get_default_str().empty()) text += fmt::format(" (default: {})", option.get_default_str());
  if (option.get_positional()) {
    return row(positional_name(option), text + (option.get_required() ? "" : " (optional)"));
  }
  std::string name = option.get_name(false, true);
  if (const std::size_t comma = name.find(','); comma != std::string::npos) name.insert(comma + 1, " ");
  if (const std::size_t negated = name.find("{false}"); negated != std::string::npos) name.erase(negated, 7);
  return row(name + value_of(option), text + (option.get_required() ? " (required)" : ""));
}

std::string option_rows(const CLI::App& app, bool positional) {
  std::string rows;
  for (const CLI::Option* option : app.get_options()) {
    const bool help_of_group = app.get_name().empty() && option == app.get_help_ptr();
    if (!option->get_group().empty() && option->get_positional() == positional && !help_of_group)
      rows += option_row(*option);
  }
  return rows;
}

std::string usage_of(const CLI::App& app, const std::string& name) {
  std::string line = name + " [OPTIONS]";
  for (const CLI::Option* option : app.get_options()) {
    if (!option->get_positional() && option->get_required())
      line += " " + option->get_name(false, false) + value_of(*option);
  }
  for (const CLI::Option* option : app.get_options()) {
    if (!option->get_positional()) continue;
    const std::string word = positional_name(*option);
    line += option->get_required() ? " " + word : " [" + word + "]";
  }
  if (app.get_require_subcommand_min() > 0) line += " COMMAND";
  return "Usage: " + wrapped(line, 7, 11);
}

// Examples are broken as a shell can read them.
std::string footer_of(const CLI::App& app) {
  constexpr std::string_view mark = "example: ";
  std::string out, footer = app.get_footer();
  for (std::size_t begin = 0; begin < footer.size();) {
    const std::size_t end = std::min(footer.find('\n', begin), footer.size());
    const std::string_view line(footer.data() + begin, end - begin);
    begin = end + 1;
    const std::size_t text = line.starts_with(mark) ? mark.size() : line.find_first_not_of(' ');
    if (text == std::string_view::npos) {
      out += "\n";
    } else if (text == 0) {
      out += wrapped(line, 0, 0);
    } else {
      out += line.substr(0, text);
      out += wrapped(line.substr(text), text, text + 2, " \\");
    }
  }
  return out;
}

}  // namespace

std::string HelpPage::make_help(const CLI::App* app, std::string name, CLI::AppFormatMode) const {
  std::string page = wrapped(app->get_description(), 0, 0) + "\n" + usage_of(*app, name);
  if (const std::string rows = option_rows(*app, /*positional=*/true); !rows.empty()) page += "\nArguments:\n" + rows;
  std::string commands, groups;
  for (const CLI::App* sub : app->get_subcommands({})) {
    if (sub->get_group().empty()) continue;
    if (sub->get_name().empty()) {  // a group of options
      groups += "\n" + wrapped(sub->get_description() + ":", 0, 0) + option_rows(*sub, /*positional=*/false);
    } else {
      commands += row(sub->get_name(), sub->get_description());
    }
  }
  if (!commands.empty()) page += "\nCommands:\n" + commands;
  page += groups + "\nOptions:\n" + option_rows(*app, /*positional=*/false);
  const std::string footer = footer_of(*app);
  return footer.empty() ? page : page + "\n" + footer;
}

}  // namespace tapetune::cli
