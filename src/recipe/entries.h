// The keys that a recipe's file and a command line give, and what is wrong with them. Private to src/recipe.
#pragma once

#include <initializer_list>
#include <map>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "recipe/schema.h"

namespace tapetune::schema {

inline constexpr std::string_view adapter_prefix = "adapter.";

// Nodes under their keys' full names. Everything that is wrong is collected and said at once.
class Entries {
 public:
  explicit Entries(std::string_view where) : where_(where) {}

  // The keys of a file, then a "key=value" that goes over them.
  void add_file(const std::string& text);
  void override_with(const std::string& setting);

  // Without those whose keys no recipe has; but which an adapter has depends on the method.
  std::map<std::string, YamlNode> given;
  // The file has keys where only version 1 had them.
  bool version1() const { return version1_; }

  void report(const YamlNode& at, const std::string& text) { problems_.push_back({at.line, text}); }
  // The same, and the key's value cannot be relied on.
  void report_bad(const std::string& name, const YamlNode& at, const std::string& text);
  bool is_bad(const std::string& name) const { return bad_.contains(name); }
  void mark_bad(const std::string& name) { bad_.insert(name); }
  // Each was read and is right by itself.
  bool fine(std::initializer_list<std::string_view> names) const;
  // The first of these that was given, or the beginning of the file.
  YamlNode at(std::initializer_list<std::string_view> names) const;

  // Fails with everything that was reported, in the order of lines.
  void require_no_problems();

 private:
  struct Reported {
    int line;
    std::string text;
  };

  void take(const std::string& name, const YamlNode& node);
  std::string today(const std::string& name, const YamlNode& node);
  void put(const std::string& written, const YamlNode& node);
  void report_unknown(const std::string& name, const YamlNode& node);

  std::string where_;
  std::set<std::string> of_adapter_;  // entries that a file of version 1 has under adapter
  bool version1_ = false;
  std::set<std::string> bad_;
  std::vector<Reported> problems_;
};

}  // namespace tapetune::schema
