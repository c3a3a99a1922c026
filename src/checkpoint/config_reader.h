// Reading config.json key by key, with errors that say file, key, rule and value; and the parts of it that are long.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/config.h"
#include "core/error.h"
#include "core/json.h"

namespace tapetune {

// One object of the file.
class ConfigReader {
 public:
  ConfigReader(const Json& object, std::string_view where, std::string prefix)
      : object_(object), where_(where), prefix_(std::move(prefix)) {}

  const Json* find(const char* key) const {
    const auto found = object_.find(key);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }

  std::int64_t positive(const char* key, std::int64_t fallback) const {
    return whole(key, fallback, 1, "must be a positive whole number");
  }
  // Which may be 0.
  std::int64_t count(const char* key, std::int64_t fallback) const {
    return whole(key, fallback, 0, "must be a whole number, 0 or more");
  }

  std::optional<double> number(const char* key) const {
    const Json* value = find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_number() || !std::isfinite(value->get<double>())) bad(key, "must be a finite number", *value);
    return value->get<double>();
  }

  double positive_number(const char* key, double fallback) const {
    const std::optional<double> value = number(key);
    if (value && *value <= 0) bad(key, "must be greater than 0", *find(key));
    return value.value_or(fallback);
  }

  bool boolean(const char* key, bool fallback) const {
    const Json* value = find(key);
    if (value == nullptr) return fallback;
    if (!value->is_boolean()) bad(key, "must be true or false", *value);
    return value->get<bool>();
  }

  std::string text(const char* key) const {
    const Json* value = find(key);
    if (value == nullptr) return {};
    if (!value->is_string()) bad(key, "must be a text", *value);
    return value->get<std::string>();
  }

  std::vector<double> numbers(const char* key, std::int64_t size) const {
    const Json* value = find(key);
    if (value == nullptr) missing(key);
    std::vector<double> list;
    if (value->is_array()) {
      for (const Json& element : *value) {
        if (!element.is_number() || !std::isfinite(element.get<double>()) || element.get<double>() <= 0) {
          bad(key, "must hold numbers greater than 0", element);
        }
        list.push_back(element.get<double>());
      }
    }
    if (static_cast<std::int64_t>(list.size()) != size) {
      fail("config", "{}: {}{} must hold {} numbers (head_dim / 2), but has {}.", where_, prefix_, key, size,
           list.size());
    }
    return list;
  }

  // As long as there are layers, or longer; empty where the key is missing.
  std::vector<Json> by_layer(const char* key, std::int64_t layers, bool may_be_longer = false) const {
    const Json* value = find(key);
    if (value == nullptr) return {};
    const auto size = static_cast<std::int64_t>(value->size());
    if (!value->is_array() || size < layers || (size > layers && !may_be_longer)) {
      bad(key, fmt::format("must be a list of {}{} (one for each layer)", may_be_longer ? "at least " : "", layers),
          *value);
    }
    return value->get<std::vector<Json>>();
  }

  // One id or a list of ids.
  std::vector<std::int64_t> ids(const char* key) const {
    const Json* value = find(key);
    if (value == nullptr) return {};
    std::vector<std::int64_t> list;
    const Json one = value->is_array() ? *value : Json::array({*value});
    for (const Json& element : one) {
      if (!element.is_number_integer()) bad(key, "must be a token id or a list of them", element);
      if (element.get<std::int64_t>() >= 0) list.push_back(element.get<std::int64_t>());
    }
    return list;
  }

  [[noreturn]] void missing(const char* key, std::string_view why = "this kind of RoPE scaling needs it") const {
    fail("config", "{}: {}{} is missing; {}.", where_, prefix_, key, why);
  }

  [[noreturn]] void bad(const char* key, std::string_view rule, const Json& value) const {
    fail("config", "{}: {}{} {}, but is {}.", where_, prefix_, key, rule, to_text(value));
  }

  std::string_view where() const { return where_; }

 private:
  std::int64_t whole(const char* key, std::int64_t fallback, std::int64_t least, std::string_view rule) const {
    const Json* value = find(key);
    if (value == nullptr) return fallback;
    // Sizes beyond this would overflow products of two of them.
    constexpr std::int64_t limit = std::int64_t{1} << 31;
    const bool integer = value->is_number_integer();
    if (!integer || value->get<double>() < static_cast<double>(least) || value->get<double>() > limit) {
      bad(key, rule, *value);
    }
    return value->get<std::int64_t>();
  }

  const Json& object_;
  std::string_view where_;
  std::string prefix_;
};

// Rotary settings in the forms of transformers 4 and 5, and as 4 has them.
RopeConfig read_rope(const Json& root, std::string_view where, std::int64_t context, std::int64_t head_dim,
                     double default_theta);
Json rope_scaling_json(const RopeConfig& rope);

// In what the layers differ, by transformers' keys or, in an architecture of our own, by ours.
void read_layers(const Json& root, const ConfigReader& reader, bool own_architecture, ModelConfig& config);
void write_layers(Json& root, const ModelConfig& config);

}  // namespace tapetune
