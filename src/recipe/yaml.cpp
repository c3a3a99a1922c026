#include "recipe/yaml.h"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <cctype>
#include <sstream>

#include "core/error.h"
#include "core/json.h"

namespace tapetune {

namespace {

// Aliases can make a small file into an endless tree.
constexpr int most_levels = 8;
constexpr int most_nodes = 100'000;

class Copy {
 public:
  explicit Copy(std::string_view where) : where_(where) {}

  YamlNode node(const YAML::Node& from, int level) {
    YamlNode to;
    to.line = line(from);
    if (level > most_levels || ++count_ > most_nodes) {
      fail("recipe", "{}:{}: nested too deeply for a recipe; it has {} levels at most.", where_, to.line, most_levels);
    }
    if (from.IsScalar()) {
      to.kind = YamlNode::Kind::scalar;
      to.text = from.Scalar();
    } else if (from.IsSequence()) {
      to.kind = YamlNode::Kind::list;
      for (const auto& item : from) to.items.push_back(node(item, level + 1));
    } else if (from.IsMap()) {
      to.kind = YamlNode::Kind::map;
      for (const auto& entry : from) {
        if (!entry.first.IsScalar()) fail("recipe", "{}:{}: a key must be a word.", where_, line(entry.first));
        YamlNode value = node(entry.second, level + 1);
        value.key = entry.first.Scalar();
        value.line = line(entry.first);
        to.items.push_back(std::move(value));
      }
    }
    return to;
  }

 private:
  static int line(const YAML::Node& node) { return std::max(node.Mark().line, 0) + 1; }

  std::string_view where_;
  int count_ = 0;
};

// Remembers where the last document began.
class Beginning final : public YAML::EventHandler {
 public:
  int line = 0;
  void OnDocumentStart(const YAML::Mark& mark) override { line = std::max(mark.line, 0) + 1; }
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark&, YAML::anchor_t) override {}
  void OnAlias(const YAML::Mark&, YAML::anchor_t) override {}
  void OnScalar(const YAML::Mark&, const std::string&, YAML::anchor_t, const std::string&) override {}
  void OnSequenceStart(const YAML::Mark&, const std::string&, YAML::anchor_t, YAML::EmitterStyle::value) override {}
  void OnSequenceEnd() override {}
  void OnMapStart(const YAML::Mark&, const std::string&, YAML::anchor_t, YAML::EmitterStyle::value) override {}
  void OnMapEnd() override {}
};

}  // namespace

YamlNode parse_yaml(const std::string& text, std::string_view where) {
  YAML::Node document;
  Beginning beginning;
  bool second = false;
  try {
    // Not LoadAll: it never ends on a text that begins with a comma.
    std::istringstream stream(text);
    YAML::Parser parser(stream);
    second = parser.HandleNextDocument(beginning) && parser.HandleNextDocument(beginning);
    document = YAML::Load(text);
  } catch (const YAML::Exception& error) {
    fail("recipe", "{}:{}: not YAML: {}.", where, std::max(error.mark.line, 0) + 1, error.msg);
  }
  if (second) {
    fail("recipe", "{}:{}: {}.", where, beginning.line,
         document.IsNull() ? "not YAML: no key can begin like this" : "a second document begins; a file is one recipe");
  }
  return Copy(where).node(document, 0);
}

std::string yaml_scalar(std::string_view text) {
  constexpr std::string_view marks = "_./+-=@%";
  const auto plain = [&](char c) { return std::isalnum(static_cast<unsigned char>(c)) || marks.find(c) != marks.npos; };
  const bool safe = !text.empty() && std::all_of(text.begin(), text.end(), plain) &&
                    std::string_view("-=@%").find(text[0]) == std::string_view::npos && text != "null" &&
                    text != "Null" && text != "NULL";
  // A JSON string is a YAML one.
  return safe ? std::string(text) : to_text(Json(text));
}

}  // namespace tapetune
