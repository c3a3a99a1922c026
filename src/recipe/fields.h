// The kinds of keys that a recipe has, each with how a value is read and written. Private to src/recipe.
#pragma once

#include <algorithm>
#include <charconv>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "recipe/schema.h"

namespace tapetune::schema {

inline constexpr std::int64_t large = std::int64_t{1} << 31;
inline constexpr double huge = 1e12;

// A value within a recipe.
template <typename T>
using Access = std::function<T&(Recipe&)>;

template <typename T>
Access<T> in(T Recipe::* member) {
  return [=](Recipe& recipe) -> T& { return recipe.*member; };
}

template <typename Outer, typename T, typename Part>
Access<T> in(Outer outer, T Part::* member) {
  return [=](Recipe& recipe) -> T& { return outer(recipe).*member; };
}

template <typename T>
bool parse_number(std::string_view text, T& value) {
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && rest == text.data() + text.size();
}

// The parts of "a,b".
std::vector<std::string> split_words(std::string_view text);
// A list as it stands, or the "a,b" of a command line. Nothing where it is neither.
std::optional<std::vector<std::string>> as_list(const YamlNode& node);
std::string yaml_list(const std::vector<std::string>& parts);

template <typename T>
Field number(std::string name, Access<T> access, T least, T most, std::string rule, std::string help) {
  const std::string type = std::is_integral_v<T> ? "whole number" : "number";
  const auto set = [=](Recipe& recipe, const YamlNode& node, const Report& report) {
    T value{};
    const bool readable = node.kind == YamlNode::Kind::scalar && parse_number(node.text, value);
    if (std::is_integral_v<T> && readable && value > most) {
      return report(node, must_be(name, fmt::format("at most {}", most), node));
    }
    if (!readable || !(value >= least && value <= most)) {
      const std::string_view kind = std::is_integral_v<T> ? "an integer" : "a number";
      return report(node, must_be(name, fmt::format("{} {}", kind, rule), node));
    }
    access(recipe) = value;
  };
  const auto get = [=](Recipe& recipe) { return fmt::format("{}", access(recipe)); };
  return {{name, type, "", rule, std::move(help), true}, set, get};
}

Field whole(std::string name, Access<std::int64_t> access, std::int64_t least, std::string help);
Field above_zero(std::string name, Access<double> access, std::string help);
Field from_zero(std::string name, Access<double> access, std::string help);
Field share(std::string name, Access<double> access, std::string help);
Field flag(std::string name, Access<bool> access, std::string help);
Field text(std::string name, Access<std::string> access, std::string type, std::string help);
// One of some words; `use` is told which.
Field word(std::string name, std::vector<std::string_view> words, std::string help,
           std::function<void(Recipe&, std::size_t)> use, std::function<std::size_t(Recipe&)> which);
Field word(std::string name, Access<std::string> access, const std::vector<std::string_view>& words, std::string help);

Field with_fallback(std::string fallback, Field field);
Field needed(Field field);
// A text that may be absent.
Field optional(Field field);
Field resume_safe(Field field);

// The method's keys: the preset, then those of its components.
Field preset_field();
Field method_field(const MethodKey& key);

}  // namespace tapetune::schema
