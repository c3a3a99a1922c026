#include "core/error.h"
#include "recipe/fields.h"

namespace tapetune::schema {

namespace {

using Kind = YamlNode::Kind;

std::string type_text(Key::Type type) {
  switch (type) {
    case Key::Type::whole:
      return "whole number";
    case Key::Type::number:
      return "number";
    case Key::Type::flag:
      return "true or false";
    case Key::Type::word:
      return "word";
    default:
      return "list";
  }
}

std::string setting_yaml(const Json& value) {
  if (value.is_null()) return "null";
  if (!value.is_array()) return value.is_string() ? yaml_scalar(value.get<std::string>()) : value_text(value);
  std::vector<std::string> parts;
  for (const Json& part : value) parts.push_back(value_text(part));
  return yaml_list(parts);
}

// A list is never null in a recipe: without a value it is empty, or all.
std::string current_yaml(const MethodKey& key, const MethodOptions& options) {
  return setting_yaml(get_setting(options, key.section, key.key.name));
}

}  // namespace

Field preset_field() {
  std::vector<std::string_view> names;
  for (const Preset& preset : presets()) names.push_back(preset.name);
  Field field;
  field.key = {"method",
               "word",
               "required, or sections below; full from scratch",
               fmt::format("{}", fmt::join(names, ", ")),
               "what the sections below have where they do not say otherwise; adapter: NAME is the same",
               true};
  field.set = [](Recipe&, const YamlNode&, const Report&) {};  // read before the others, which depend on it
  field.get = [](Recipe& recipe) { return recipe.method.preset; };
  return field;
}

Field method_field(const MethodKey& key) {
  const std::string name = key.name();
  std::string fallback = setting_yaml(key.key.fallback);
  for (const Preset& preset : presets()) {
    const MethodOptions options = parse_method(preset.name, {});
    if (find_key(options, key.section, key.key.name) == nullptr) continue;
    const std::string own = current_yaml(key, options);
    const bool empty = own == "[]" && fallback == "null";
    if (own != fallback && !empty) fallback += fmt::format(" ({}: {})", preset.name, own);
  }
  Field field;
  const bool choice = key.section != Section::top && key.components.empty() && !key.key.words.empty();
  field.key = {name,
               type_text(key.key.type),
               fallback,
               fmt::format("{}", fmt::join(choice ? key.key.words : key.components, ", ")),
               std::string(key.key.help),
               true};
  field.optional = key.key.fallback.is_null();
  field.set = [key, name](Recipe& recipe, const YamlNode& node, const Report& report) {
    const bool list = key.key.type == Key::Type::words || key.key.type == Key::Type::wholes;
    const auto parts = list || node.kind == Kind::scalar ? as_list(node) : std::nullopt;
    if (!parts) return report(node, must_be(name, "a " + type_text(key.key.type), node));
    const std::string value = node.kind == Kind::scalar ? node.text : fmt::format("{}", fmt::join(*parts, ","));
    try {
      set_setting(recipe.method, key.section, key.key.name, value);
    } catch (const SettingError& error) {
      report(node, fmt::format("{}{}", name, error.rule()));
    } catch (const Error& error) {
      report(node, std::string(error.text()));
    }
  };
  field.get = [key](Recipe& recipe) {
    return find_key(recipe.method, key.section, key.key.name) == nullptr ? "" : current_yaml(key, recipe.method);
  };
  return field;
}

}  // namespace tapetune::schema
