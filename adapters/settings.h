// What a user may set about a component: a table of keys, and their values. No tensors: recipes need this too.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "core/json.h"

namespace tapetune {

struct Key {
  enum class Type { whole, number, flag, word, words, wholes };

  std::string_view name;
  std::string_view help;
  Type type = Type::whole;
  Json fallback = Json();                    // null: not set
  double least = 0, most = 0;                // whole, number
  std::string_view rule = {};                // of a number: "an integer >= 1"
  std::vector<std::string_view> words = {};  // word, words: what may be; empty: anything
  // Other spellings of a word ("q_proj" for "q"), and what is wrong with one; null: none, nothing.
  std::string_view (*spelled)(std::string_view word) = nullptr;
  void (*check_word)(std::string_view word) = nullptr;
};

// Whether one of `others` has this key's name and another type.
bool has_other_type(const Key& key, std::span<const Key> others);

// A value that a key does not take: "rank must be …".
class SettingError : public Error {
 public:
  SettingError(const Key& key, const std::string& rule)
      : Error("method", fmt::format("{}{}", key.name, rule)), key_size_(key.name.size()) {}
  // What follows the key, for those who give it a longer name.
  std::string_view rule() const { return text().substr(key_size_); }

 private:
  std::size_t key_size_;
};

// A value from a command line or a recipe's scalar; lists as a,b. Fails with what the key takes.
Json parse_value(const Key& key, std::string_view text);
// The same from a file.
Json check_value(const Key& key, const Json& value);
// As parse_value reads it back.
std::string value_text(const Json& value);

// A component by its name, with a value for each of its keys.
struct Settings {
  std::string type;
  Json values = Json::object();

  std::int64_t whole(std::string_view key) const;
  double number(std::string_view key) const;
  bool flag(std::string_view key) const;
  std::string word(std::string_view key) const;
  std::vector<std::string> words(std::string_view key) const;
  std::vector<std::int64_t> wholes(std::string_view key) const;

  bool operator==(const Settings&) const = default;
};

// All keys with their fallbacks.
Settings default_settings(std::string_view type, std::span<const Key> keys);

// "name" and its value, without those that are not set; for files.
Json settings_json(std::string_view type_key, const Settings& settings);

}  // namespace tapetune
