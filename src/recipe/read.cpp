// Reads a whole recipe before it says what is wrong: entries of the file and the command line, their values, then what
// cannot be together.
#include <algorithm>

#include "core/error.h"
#include "core/file.h"
#include "core/nearest.h"
#include "recipe/check.h"
#include "recipe/entries.h"

namespace tapetune {

using namespace schema;

namespace {

using Kind = YamlNode::Kind;

std::string text_of(const YamlNode& node) {
  if (node.kind == Kind::scalar) return node.text;
  std::vector<std::string> parts;
  parts.reserve(node.items.size());
  for (const YamlNode& item : node.items) parts.push_back(item.text);
  return fmt::format("{}", fmt::join(parts, ","));
}

void report_missing(Entries& entries, const Field& field) {
  YamlNode first;
  first.line = 1;
  entries.report_bad(field.key.name, first, fmt::format("{} is missing: {}.", field.key.name, field.key.help));
}

// Where a key of the method is in its settings; none: it is not the method's.
std::optional<Section> section_in_method(std::string_view name) {
  for (const Section section : {Section::adapter, Section::positions, Section::attention}) {
    if (name.starts_with(fmt::format("{}.", section_name(section)))) return section;
  }
  return name == "train_also" || name == "untie" ? std::optional(Section::top) : std::nullopt;
}

bool chooses_components(const Entries& entries) {
  return std::ranges::any_of(entries.given, [](const auto& entry) {
    return entry.first == "positions.encoding" || entry.first == "attention.pattern" || entry.first == "train_also" ||
           entry.first.starts_with("adapter.");
  });
}

// The key that names a section's component.
std::string choice_of(Section section) {
  return section == Section::positions ? "positions.encoding"
         : section == Section::adapter ? "adapter.type"
                                       : "attention.pattern";
}

// Which other keys there are depends on them.
void choose_components(MethodOptions& method, Entries& entries) {
  for (const Section section : {Section::positions, Section::adapter, Section::attention}) {
    const std::string full = choice_of(section), key(last_of(full));
    const auto found = entries.given.find(full);
    if (found == entries.given.end() || found->second.kind == Kind::null) continue;
    if (found->second.kind != Kind::scalar) {
      entries.report_bad(full, found->second, must_be(full, "a word", found->second));
      continue;
    }
    try {
      set_setting(method, section, key, found->second.text);
    } catch (const Error& error) {
      entries.report_bad(full, found->second, fmt::format("{}: {}", full, error.text()));
    }
  }
  bool declined = false;
  for (const auto& [name, node] : entries.given) {
    if (!name.starts_with(adapter_prefix) || node.kind != Kind::scalar) continue;
    if (choose_by_key(method, name.substr(adapter_prefix.size()), node.text)) declined = method.adapter.type == "none";
  }
  if (!declined) return;
  std::erase_if(entries.given, [&](const auto& entry) {
    const auto& [name, node] = entry;
    if (!name.starts_with(adapter_prefix)) return false;
    const std::string key = name.substr(adapter_prefix.size());
    return choose_by_key(method, key, "0") || is_idle_setting(method, key, text_of(node));
  });
}

void choose_method(Recipe& recipe, Entries& entries) {
  const auto found = entries.given.find("method");
  std::string name = recipe.init ? "full" : "none";
  YamlNode at;
  at.line = 1;
  if (found != entries.given.end()) {
    at = found->second;
    if (at.kind != Kind::scalar) return entries.report_bad("method", at, must_be("method", "a word", at));
    name = at.text;
  } else if (entries.is_bad("adapter")) {
    entries.mark_bad("method");
    return;
  } else if (!recipe.init && !chooses_components(entries)) {
    return entries.report_bad("method", at,
                              "method is missing: name one, as \"method: tape\", or choose components in sections.");
  }
  try {
    recipe.method = parse_method(name, {});
  } catch (const Error& error) {
    return entries.report_bad("method", at, std::string(error.text()));
  }
  choose_components(recipe.method, entries);
}

// Whether the method has such a setting; says so where it has not.
bool has_place(const Recipe& recipe, Entries& entries, const Field& field, const YamlNode& node) {
  const std::string& name = field.key.name;
  const std::optional<Section> section = section_in_method(name);
  if (!section) return true;
  // A component that there is not, and keys that it may have.
  if (entries.is_bad(name) || (*section != Section::top && entries.is_bad(choice_of(*section)))) return false;
  if (find_key(recipe.method, *section, last_of(name)) != nullptr) return true;
  if (entries.is_bad("method")) return false;
  entries.report(node, "method " + no_setting(recipe.method, *section, last_of(name)));
  return false;
}

// Keys under adapter that no adapter has.
void report_unknown_settings(const Recipe& recipe, Entries& entries) {
  const std::vector<MethodKey> keys = method_keys();
  for (const auto& [name, node] : entries.given) {
    if (find_field(name) != nullptr || entries.is_bad(choice_of(Section::adapter))) continue;
    const std::string setting = name.substr(adapter_prefix.size());
    const auto elsewhere = std::ranges::find_if(keys, [&](const MethodKey& key) { return key.key.name == setting; });
    if (elsewhere != keys.end()) {
      entries.report(node, fmt::format("{} does not belong under adapter; write {}.", setting, elsewhere->name()));
    } else if (entries.is_bad("method")) {
      const std::vector<std::string_view> known = names_in("adapter");
      entries.report(node, fmt::format("adapter has no setting \"{}\"; it takes {}{}.", shortened(setting),
                                       fmt::join(known, ", "), did_you_mean(setting, known)));
    } else {
      entries.report(node, "method " + no_setting(recipe.method, Section::adapter, shortened(setting)));
    }
  }
}

void fill(Recipe& recipe, Entries& entries) {
  const bool from_scratch = std::any_of(entries.given.begin(), entries.given.end(),
                                        [](const auto& e) { return e.first.starts_with("model."); });
  if (from_scratch) random_model(recipe);
  if (const auto folder = entries.given.find("model"); from_scratch && folder != entries.given.end()) {
    entries.report_bad("model", folder->second, "model is both a folder and a map of keys; remove one of them.");
    entries.given.erase(folder);
  }
  choose_method(recipe, entries);
  for (const Field& field : fields()) {
    const std::string& name = field.key.name;
    const auto found = entries.given.find(name);
    const bool of_model = section_of(name) == "model";
    if (found == entries.given.end()) {
      if (field.needed && !(name == "model" && from_scratch) && !(of_model && !from_scratch))
        report_missing(entries, field);
      continue;
    }
    const YamlNode& node = found->second;
    if (node.kind == Kind::null) {
      if (field.optional || entries.is_bad(name)) continue;
      entries.report_bad(name, node, fmt::format("{} has no value; give one, or remove the key.", name));
    } else if (!has_place(recipe, entries, field, node)) {
      entries.mark_bad(name);
    } else {
      field.set(recipe, node, [&](const YamlNode& at, const std::string& text) { entries.report_bad(name, at, text); });
    }
  }
  report_unknown_settings(recipe, entries);
}

}  // namespace

Recipe parse_recipe(const std::string& text, std::string_view where, std::span<const std::string> overrides) {
  Entries entries(where);
  entries.add_file(text);
  for (const std::string& each : overrides) entries.override_with(each);
  Recipe recipe;
  recipe.version1 = entries.version1();
  fill(recipe, entries);
  check_recipe(recipe, entries);
  entries.require_no_problems();
  return recipe;
}

Recipe read_recipe(const std::filesystem::path& file, std::span<const std::string> overrides) {
  constexpr std::uintmax_t most = 1 << 20;
  std::error_code error;
  if (std::filesystem::is_directory(file, error)) fail("recipe", "{}: a folder; give a YAML file.", file.string());
  if (const std::uintmax_t size = std::filesystem::file_size(file, error); !error && size > most) {
    fail("recipe", "{}: {} bytes are too many for a recipe; give a YAML file.", file.string(), size);
  }
  return parse_recipe(read_text(file), file.string(), overrides);
}

}  // namespace tapetune
