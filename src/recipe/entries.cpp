#include "recipe/entries.h"

#include <algorithm>
#include <limits>

#include "adapters/component.h"
#include "core/error.h"
#include "core/nearest.h"

namespace tapetune::schema {

namespace {

using Kind = YamlNode::Kind;

// An adapter that is no method's name too.
bool is_component(std::string_view word) {
  return adapter_components().get(word) != nullptr &&
         std::ranges::none_of(presets(), [&](const Preset& preset) { return preset.name == word; });
}

void forget_lines(YamlNode& node) {
  node.line = 0;
  for (YamlNode& item : node.items) forget_lines(item);
}

}  // namespace

void Entries::add_file(const std::string& text) {
  const YamlNode root = parse_yaml(text, where_);
  if (root.kind != Kind::map) {
    fail("recipe", "{}:{}: a recipe is a map of keys, as \"steps: 1000\", but this is {}.", where_,
         std::max(root.line, 1), root.kind == Kind::null ? "empty" : shown(root));
  }
  for (const YamlNode& node : root.items) take(node.key, node);
}

void Entries::take(const std::string& name, const YamlNode& node) {
  if (is_section(name) && node.kind == Kind::map) {
    for (const YamlNode& child : node.items) take(name + "." + child.key, child);
    if (name == "model" && node.items.empty()) put(name, node);
  } else if (name == "adapter" && node.kind == Kind::scalar) {
    put(is_component(node.text) ? "adapter.type" : "adapter.method", node);
  } else if (name == "schedule" && node.kind == Kind::scalar) {
    put("schedule.kind", node);
  } else if (find_field(name) != nullptr || name.starts_with("adapter.")) {
    put(name, node);  // which keys an adapter has depends on its method
  } else if (is_section(name)) {
    if (node.kind == Kind::null) return;
    report(node, must_be(name, fmt::format("a map of {}", fmt::join(names_in(name), ", ")), node));
    bad_.insert(name);
  } else {
    report_unknown(name, node);
  }
}

// Where a key of version 1 is now, which had the whole method under adapter.
std::string Entries::today(const std::string& name, const YamlNode& node) {
  if (!name.starts_with(adapter_prefix) || find_field(name) != nullptr) return name;
  const std::string key = name.substr(adapter_prefix.size());
  if (key == "method") {
    version1_ = version1_ || node.line > 0;
    return key;
  }
  const std::optional<Section> section = section_since_version2(key);
  if (!section) return name;
  const std::string now = fmt::format("{}.{}", section_name(*section), key);
  of_adapter_.insert(now);
  return now;
}

void Entries::put(const std::string& written, const YamlNode& node) {
  const std::string name = today(written, node);
  const auto [at, added] = given.emplace(name, node);
  if (added) return;
  if (node.line == 0) {
    at->second = node;
  } else {
    report(node, fmt::format("{} is given twice; the first is on line {}.", name, at->second.line));
  }
}

void Entries::report_unknown(const std::string& name, const YamlNode& node) {
  const std::string section = section_of(name);
  std::string meant;
  if (!section.empty() && is_section(section)) {
    const std::vector<std::string_view> known = names_in(section);
    report(node, fmt::format("unknown key \"{}\"; {} takes {}{}.", shortened(name), section, fmt::join(known, ", "),
                             did_you_mean(last_of(name), known)));
    return;
  }
  for (const Field& field : fields()) {
    if (meant.empty() && last_of(field.key.name) == name) meant = field.key.name;
  }
  if (meant.empty()) meant = nearest(name, names_in(""));
  report(node, fmt::format("unknown key \"{}\"{}.", shortened(name),
                           meant.empty() ? "; \"tapetune recipes keys\" lists all"
                                         : fmt::format(" (did you mean {}?)", meant)));
}

void Entries::override_with(const std::string& setting) {
  const std::size_t equals = setting.find('=');
  YamlNode node;
  if (equals == std::string::npos || equals == 0) {
    return report(node,
                  fmt::format("\"{}\" is not a setting; write key=value, for example steps=100.", shortened(setting)));
  }
  const std::string name = setting.substr(0, equals), value = setting.substr(equals + 1);
  if (value.starts_with('[') || value.starts_with('{')) {
    try {
      node = parse_yaml(value, name);
    } catch (const Error&) {
      return report(YamlNode{}, fmt::format("{} is not YAML: {}", name, shortened(value)));
    }
    forget_lines(node);
  } else if (value != "null" && value != "~") {
    node.kind = Kind::scalar;
    node.text = value;
  }
  // A section, or what stands in its place, replaces all of it; a kind of schedule is no more than that.
  if (is_section(name) && (name != "schedule" || node.kind != Kind::scalar)) {
    std::erase_if(given, [&](const auto& entry) {
      const bool moved = name == "adapter" && (entry.first == "method" || of_adapter_.contains(entry.first));
      return moved || entry.first == name || section_of(entry.first) == name;
    });
  }
  if (const std::string section = section_of(name); find_field(section) != nullptr) given.erase(section);
  if (node.kind == Kind::null && (find_field(name) != nullptr || is_section(name))) {
    given.erase(name);
  } else {
    take(name, node);
  }
}

void Entries::report_bad(const std::string& name, const YamlNode& at, const std::string& text) {
  report(at, text);
  bad_.insert(name);
}

bool Entries::fine(std::initializer_list<std::string_view> names) const {
  return std::none_of(names.begin(), names.end(), [&](std::string_view name) {
    return bad_.contains(std::string(name)) || bad_.contains(section_of(name));
  });
}

YamlNode Entries::at(std::initializer_list<std::string_view> names) const {
  for (const std::string_view name : names) {
    if (const auto found = given.find(std::string(name)); found != given.end()) return found->second;
  }
  YamlNode first;
  first.line = 1;
  return first;
}

void Entries::require_no_problems() {
  if (problems_.empty()) return;
  const auto order = [](int line) { return line == 0 ? std::numeric_limits<int>::max() : line; };
  std::stable_sort(problems_.begin(), problems_.end(),
                   [&](const Reported& a, const Reported& b) { return order(a.line) < order(b.line); });
  std::vector<std::string> lines;
  for (Reported& problem : problems_) {
    for (char& c : problem.text) c = c == '\n' || c == '\r' ? ' ' : c;
    const std::string place = problem.line == 0 ? "command line" : fmt::format("{}:{}", where_, problem.line);
    lines.push_back(fmt::format("[recipe] {}: {}", place, problem.text));
  }
  throw Error(fmt::format("{}", fmt::join(lines, "\n")));
}

}  // namespace tapetune::schema
