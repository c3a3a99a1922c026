#include "recipe/fields.h"

#include "core/nearest.h"

namespace tapetune::schema {

namespace {

using Kind = YamlNode::Kind;

}  // namespace

std::vector<std::string> split_words(std::string_view text) {
  std::vector<std::string> parts;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find(','), text.size());
    if (end > 0) parts.emplace_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return parts;
}

std::optional<std::vector<std::string>> as_list(const YamlNode& node) {
  if (node.kind == Kind::scalar) return split_words(node.text);
  if (node.kind != Kind::list) return std::nullopt;
  std::vector<std::string> parts;
  for (const YamlNode& item : node.items) {
    if (item.kind != Kind::scalar) return std::nullopt;
    parts.push_back(item.text);
  }
  return parts;
}

std::string yaml_list(const std::vector<std::string>& parts) {
  std::vector<std::string> scalars;
  scalars.reserve(parts.size());
  for (const std::string& part : parts) scalars.push_back(yaml_scalar(part));
  return fmt::format("[{}]", fmt::join(scalars, ", "));
}

Field whole(std::string name, Access<std::int64_t> access, std::int64_t least, std::string help) {
  return number<std::int64_t>(std::move(name), access, least, large, fmt::format(">= {}", least), std::move(help));
}

Field above_zero(std::string name, Access<double> access, std::string help) {
  return number<double>(std::move(name), access, std::numeric_limits<double>::denorm_min(), huge, "above 0",
                        std::move(help));
}

Field from_zero(std::string name, Access<double> access, std::string help) {
  return number<double>(std::move(name), access, 0.0, huge, ">= 0", std::move(help));
}

Field share(std::string name, Access<double> access, std::string help) {
  return number<double>(std::move(name), access, 0.0, std::nextafter(1.0, 0.0), "from 0 to below 1", std::move(help));
}

Field flag(std::string name, Access<bool> access, std::string help) {
  const auto set = [=](Recipe& recipe, const YamlNode& node, const Report& report) {
    const auto is = [&](std::initializer_list<std::string_view> words) {
      return node.kind == Kind::scalar && std::find(words.begin(), words.end(), node.text) != words.end();
    };
    if (!is({"true", "yes", "1", "false", "no", "0"})) return report(node, must_be(name, "true or false", node));
    access(recipe) = is({"true", "yes", "1"});
  };
  const auto get = [=](Recipe& recipe) { return fmt::format("{}", access(recipe)); };
  return {{name, "true or false", "", "", std::move(help), true}, set, get};
}

Field text(std::string name, Access<std::string> access, std::string type, std::string help) {
  const auto set = [=](Recipe& recipe, const YamlNode& node, const Report& report) {
    if (node.kind != Kind::scalar || node.text.empty()) return report(node, must_be(name, "a " + type, node));
    access(recipe) = node.text;
  };
  return {
      {name, type, "", "", std::move(help), true}, set, [=](Recipe& recipe) { return yaml_scalar(access(recipe)); }};
}

Field word(std::string name, std::vector<std::string_view> words, std::string help,
           std::function<void(Recipe&, std::size_t)> use, std::function<std::size_t(Recipe&)> which) {
  const std::string rule = fmt::format("{}", fmt::join(words, ", "));
  const auto set = [=](Recipe& recipe, const YamlNode& node, const Report& report) {
    const auto found = std::find(words.begin(), words.end(), node.text);
    if (node.kind != Kind::scalar || found == words.end()) {
      return report(node, fmt::format("{} must be one of {}, but is {}{}.", name, rule, shown(node),
                                      node.kind == Kind::scalar ? did_you_mean(node.text, words) : ""));
    }
    use(recipe, static_cast<std::size_t>(found - words.begin()));
  };
  const auto get = [=](Recipe& recipe) { return std::string(words[which(recipe)]); };
  return {{name, "word", "", rule, std::move(help), true}, set, get};
}

Field word(std::string name, Access<std::string> access, const std::vector<std::string_view>& words, std::string help) {
  return word(
      std::move(name), words, std::move(help),
      [=](Recipe& recipe, std::size_t i) { access(recipe) = std::string(words[i]); },
      [=](Recipe& recipe) {
        return static_cast<std::size_t>(std::find(words.begin(), words.end(), access(recipe)) - words.begin());
      });
}

Field with_fallback(std::string fallback, Field field) {
  field.key.fallback = std::move(fallback);
  return field;
}

Field needed(Field field) {
  field.needed = true;
  return field;
}

Field optional(Field field) {
  field.optional = true;
  field.set = [set = field.set](Recipe& recipe, const YamlNode& node, const Report& report) {
    if (node.kind != Kind::scalar || !node.text.empty()) set(recipe, node, report);
  };
  field.get = [get = field.get](Recipe& recipe) {
    const std::string value = get(recipe);
    return value == yaml_scalar("") ? "null" : value;
  };
  return field;
}

Field resume_safe(Field field) {
  field.key.affects_result = false;
  return field;
}

}  // namespace tapetune::schema
