#include "compare/eval_file.h"

#include <algorithm>
#include <array>
#include <charconv>

#include "core/error.h"
#include "core/file.h"
#include "core/nearest.h"
#include "recipe/yaml.h"

namespace tapetune {

namespace {

using Kind = YamlNode::Kind;

class Reader {
 public:
  explicit Reader(std::string_view where) : where_(where) {}

  EvalPlan plan(const YamlNode& root) const {
    EvalPlan plan;
    if (root.kind == Kind::null) return plan;
    for (const YamlNode& node : entries(root, "the file")) {
      if (node.key == "data") {
        plan.data = words(node);
      } else if (node.key == "contexts") {
        plan.contexts = contexts(node);
      } else if (node.key == "protocol") {
        plan.protocol = protocol(node);
      } else if (node.key == "stride") {
        plan.stride = number(node, 1);
      } else if (node.key == "limit") {
        plan.limit = number(node, 1);
      } else if (node.key == "passkey") {
        plan.passkey = passkey(node);
      } else {
        unknown(node, {"data", "contexts", "protocol", "stride", "limit", "passkey"});
      }
    }
    return plan;
  }

 private:
  template <typename... Args>
  [[noreturn]] void wrong(const YamlNode& at, fmt::format_string<Args...> text, Args&&... args) const {
    fail("compare", "{}:{}: {}", where_, std::max(1, at.line), fmt::format(text, std::forward<Args>(args)...));
  }

  [[noreturn]] void unknown(const YamlNode& node, const std::vector<std::string_view>& known) const {
    const std::string meant = nearest(node.key, known);
    wrong(node, "unknown key \"{}\"; the keys are {}{}.", node.key, fmt::join(known, ", "),
          meant.empty() ? "" : fmt::format(" (did you mean {}?)", meant));
  }

  const std::vector<YamlNode>& entries(const YamlNode& node, std::string_view what) const {
    if (node.kind != Kind::map) wrong(node, "{} must be a map, for example \"contexts: [1024, 2048]\".", what);
    for (std::size_t i = 0; i < node.items.size(); ++i) {
      for (std::size_t j = 0; j < i; ++j) {
        if (node.items[i].key == node.items[j].key) wrong(node.items[i], "{} is given twice.", node.items[i].key);
      }
    }
    return node.items;
  }

  std::vector<std::string> words(const YamlNode& node) const {
    std::vector<std::string> list;
    if (node.kind == Kind::scalar) list.push_back(node.text);
    if (node.kind == Kind::list) {
      for (const YamlNode& item : node.items) list.push_back(item.kind == Kind::scalar ? item.text : "");
    }
    if (list.empty() || std::find(list.begin(), list.end(), "") != list.end())
      wrong(node, "{} must be a value or a list of values.", node.key);
    return list;
  }

  std::int64_t number(const YamlNode& node, std::int64_t least) const {
    if (node.kind != Kind::scalar) wrong(node, "{} must be a whole number.", node.key);
    return number(node, node.text, least);
  }

  std::int64_t number(const YamlNode& node, const std::string& text, std::int64_t least) const {
    std::int64_t value = 0;
    const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || rest != text.data() + text.size() || value < least)
      wrong(node, "{} must be a whole number, at least {}, but is \"{}\".", node.key, least, text);
    return value;
  }

  std::vector<std::int64_t> contexts(const YamlNode& node) const {
    std::vector<std::int64_t> list;
    for (const std::string& word : words(node)) list.push_back(number(node, word, 2));
    std::sort(list.begin(), list.end());
    if (const auto twice = std::adjacent_find(list.begin(), list.end()); twice != list.end())
      wrong(node, "{} has {} twice.", node.key, *twice);
    return list;
  }

  Protocol protocol(const YamlNode& node) const {
    if (node.kind != Kind::scalar) wrong(node, "protocol must be a word.");
    try {
      return parse_protocol(node.text);
    } catch (const Error& error) {
      const std::string_view text = error.what();
      wrong(node, "{}", text.substr(text.find("] ") + 2));
    }
  }

  PasskeyPlan passkey(const YamlNode& node) const {
    PasskeyPlan plan;
    for (const YamlNode& entry : entries(node, "passkey")) {
      if (entry.key == "contexts") {
        plan.contexts = contexts(entry);
      } else if (entry.key == "depths") {
        plan.depths = number(entry, 1);
      } else if (entry.key == "trials") {
        plan.trials = number(entry, 1);
      } else if (entry.key == "seed") {
        plan.seed = static_cast<std::uint64_t>(number(entry, 0));
      } else {
        unknown(entry, {"contexts", "depths", "trials", "seed"});
      }
    }
    return plan;
  }

  std::string_view where_;
};

}  // namespace

EvalPlan parse_eval_plan(const std::string& text, std::string_view where) {
  return Reader(where).plan(parse_yaml(text, where));
}

EvalPlan read_eval_plan(const std::filesystem::path& file) { return parse_eval_plan(read_text(file), file.string()); }

}  // namespace tapetune
