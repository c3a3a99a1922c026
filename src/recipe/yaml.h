// YAML as a tree of plain values that know their lines.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tapetune {

struct YamlNode {
  enum class Kind { null, scalar, list, map };

  Kind kind = Kind::null;
  int line = 0;      // from 1 on, of the key where there is one; 0: not from a file
  std::string key;   // of an entry of a map
  std::string text;  // of a scalar
  std::vector<YamlNode> items;
};

// One document; `where` names the file in errors, which say the line. An empty text is a null.
YamlNode parse_yaml(const std::string& text, std::string_view where);

// A scalar that reads back as this text wherever it stands: plain where that is safe, quoted otherwise.
std::string yaml_scalar(std::string_view text);

}  // namespace tapetune
