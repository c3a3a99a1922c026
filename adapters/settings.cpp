#include "adapters/settings.h"

#include <algorithm>
#include <charconv>

#include "core/error.h"
#include "core/nearest.h"

namespace tapetune {

namespace {

std::vector<std::string_view> split(std::string_view text) {
  std::vector<std::string_view> parts;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find(','), text.size());
    if (end > 0) parts.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return parts;
}

template <typename... Args>
[[noreturn]] void refuse(const Key& key, fmt::format_string<Args...> rule, Args&&... args) {
  throw SettingError(key, fmt::format(rule, std::forward<Args>(args)...));
}

template <typename T>
T number(const Key& key, std::string_view text) {
  T value{};
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool readable = error == std::errc() && rest == text.data() + text.size();
  const auto size = static_cast<double>(value);
  if (std::is_integral_v<T> && readable && size > key.most) {
    refuse(key, " must be at most {}, but is \"{}\".", static_cast<std::int64_t>(key.most), text);
  }
  if (!readable || !(size >= key.least && size <= key.most)) {
    refuse(key, " must be {}, but is \"{}\".", key.rule, text);
  }
  return value;
}

std::string one_word(const Key& key, std::string_view text) {
  if (key.spelled != nullptr) text = key.spelled(text);
  if (key.check_word != nullptr) key.check_word(text);
  if (!key.words.empty() && std::ranges::find(key.words, text) == key.words.end()) {
    refuse(key, " cannot be \"{}\"; it takes {}{}.", text, fmt::join(key.words, ", "), did_you_mean(text, key.words));
  }
  return std::string(text);
}

const Json& at(const Settings& settings, std::string_view key) {
  const auto found = settings.values.find(key);
  if (found == settings.values.end()) fail("method", "{} has no value for {}.", settings.type, key);
  return *found;
}

template <typename T>
std::vector<T> list(const Settings& settings, std::string_view key) {
  const Json& value = at(settings, key);
  return value.is_null() ? std::vector<T>() : value.get<std::vector<T>>();
}

}  // namespace

bool has_other_type(const Key& key, std::span<const Key> others) {
  return std::ranges::any_of(others,
                             [&](const Key& other) { return other.name == key.name && other.type != key.type; });
}

Json parse_value(const Key& key, std::string_view text) {
  switch (key.type) {
    case Key::Type::whole:
      return number<std::int64_t>(key, text);
    case Key::Type::number:
      return number<double>(key, text);
    case Key::Type::flag:
      if (text == "true" || text == "1" || text == "yes") return true;
      if (text == "false" || text == "0" || text == "no") return false;
      refuse(key, " must be true or false, but is \"{}\".", text);
    case Key::Type::word:
      return one_word(key, text);
    case Key::Type::words: {
      Json all = Json::array();
      for (const std::string_view part : split(text)) {
        Json word = one_word(key, part);
        if (std::ranges::find(all, word) == all.end()) all.push_back(std::move(word));
      }
      if (all.empty() && !key.fallback.is_null() && !key.fallback.empty()) {
        refuse(key, " is empty; name some, for example {}={}.", key.name, value_text(key.fallback));
      }
      return all.empty() ? Json() : all;
    }
    case Key::Type::wholes: {
      Json all = Json::array();
      for (const std::string_view part : split(text)) all.push_back(number<std::int64_t>(key, part));
      return all.empty() ? Json() : all;
    }
  }
  return {};
}

Json check_value(const Key& key, const Json& value) { return parse_value(key, value_text(value)); }

std::string value_text(const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_number_float()) return fmt::format("{}", value.get<double>());
  if (!value.is_array()) return to_text(value);
  std::vector<std::string> parts;
  parts.reserve(value.size());
  for (const Json& part : value) parts.push_back(value_text(part));
  return fmt::format("{}", fmt::join(parts, ","));
}

std::int64_t Settings::whole(std::string_view key) const { return at(*this, key).get<std::int64_t>(); }
double Settings::number(std::string_view key) const { return at(*this, key).get<double>(); }
bool Settings::flag(std::string_view key) const { return at(*this, key).get<bool>(); }
std::string Settings::word(std::string_view key) const { return at(*this, key).get<std::string>(); }
std::vector<std::string> Settings::words(std::string_view key) const { return list<std::string>(*this, key); }
std::vector<std::int64_t> Settings::wholes(std::string_view key) const { return list<std::int64_t>(*this, key); }

Settings default_settings(std::string_view type, std::span<const Key> keys) {
  Settings settings{std::string(type), Json::object()};
  for (const Key& key : keys) settings.values[std::string(key.name)] = key.fallback;
  return settings;
}

Json settings_json(std::string_view type_key, const Settings& settings) {
  Json json;
  json[std::string(type_key)] = settings.type;
  for (const auto& [key, value] : settings.values.items()) {
    if (!value.is_null()) json[key] = value;
  }
  return json;
}

}  // namespace tapetune
