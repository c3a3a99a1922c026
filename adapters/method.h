// A method: one component of each kind, RoPE settings, and the weights of the base that train. A preset is a method
// with a name; a recipe's sections refine it.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "adapters/settings.h"
#include "checkpoint/config.h"

namespace tapetune {

// Which weights of the base train.
struct TrainAlso {
  bool embeddings = false, norms = false, head = false;
  bool all = false;
  bool any() const { return embeddings || norms || head || all; }
  bool operator==(const TrainAlso&) const = default;
};

inline constexpr std::string_view base_positions = "model";    // those that the base has
inline constexpr std::string_view default_positions = "rope";  // of a base that does not say

struct MethodOptions {
  std::string preset = "none";
  Settings adapter{"none", Json::object()};
  Settings positions{std::string(base_positions), Json::object()};
  Settings attention{"full", Json::object()};
  bool window = true;  // sliding windows as the model's config has them; false: none, as before version 2

  // RoPE settings; what is not given stays as in the model's config.
  std::optional<RopeType> scaling;
  std::optional<double> factor;
  std::optional<double> theta;

  TrainAlso train_also;
  bool untie = false;

  bool operator==(const MethodOptions&) const = default;
  // The preset, or, where components were chosen without one, what they are called: "alibi + full".
  std::string name() const;
};

struct Preset {
  std::string_view name;
  std::string_view summary;
  void (*set)(MethodOptions& options);
};

std::span<const Preset> presets();
// Fails with the nearest name where there is none such.
const Preset& find_preset(std::string_view name);

// The settings of a method as a recipe has them: by section, where "" is the top level.
enum class Section { adapter, positions, attention, top };
std::string_view section_name(Section section);
struct MethodKey {
  Section section;
  Key key;
  std::vector<std::string_view> components;  // that have it; empty: all
  std::string name() const;                  // "adapter.rank", "train_also"
};
// All of them: the choice of a component first, then every component's keys, in the order in which people read them.
std::vector<MethodKey> method_keys();
// Null where this method has no such setting now.
const Key* find_key(const MethodOptions& options, Section section, std::string_view key);
// The section of the first that has it; none: no section has.
std::optional<Section> section_of_key(const MethodOptions& options, std::string_view key);

Json get_setting(const MethodOptions& options, Section section, std::string_view key);
// Choosing a component gives its keys their fallbacks.
void set_setting(MethodOptions& options, Section section, std::string_view key, std::string_view text);
// Where there is no adapter, a key may choose one: rank chooses lora. With rank 0, by which earlier versions said that
// there is none, it does not.
bool choose_by_key(MethodOptions& options, std::string_view key, std::string_view text);
// Whether a key is of the adapter that rank 0 did not choose, and has the value that it would have anyway.
bool is_idle_setting(const MethodOptions& options, std::string_view key, std::string_view text);
// What to say of a key that this method does not have.
std::string no_setting(const MethodOptions& options, Section section, std::string_view key);
// Where a key is that earlier versions had under adapter: mix at positions, group at attention.
std::optional<Section> section_since_version2(std::string_view key);

// A preset, then "key=value" overrides; a key may be short where it is of one section: rank, adapter.rank. Fails on an
// unknown preset, a key that the method does not have and a value that the key cannot take, each with what would be
// right.
MethodOptions parse_method(std::string_view preset, std::span<const std::string> overrides);

// What is wrong with settings that are right each by itself.
struct MethodProblem {
  Section section;
  std::string key;   // empty: of the component as a whole
  std::string text;  // what follows the key
  std::string message(bool with_section) const;
};
struct RecipeFacts;
std::vector<MethodProblem> method_problems(const MethodOptions& options, const RecipeFacts& facts);
// Fails with the first.
void check_method(const MethodOptions& options, const RecipeFacts& facts);

// Every setting that has a value, under its name and as parse_method reads it, the preset left out; for people.
std::vector<std::pair<std::string, std::string>> shown_settings(const MethodOptions& options);

// A method with all its settings, and back; also as version 1 wrote it, all settings in one object.
Json method_json(const MethodOptions& options);
struct ReadMethod {
  MethodOptions options;
  bool version1 = false;
};
ReadMethod method_from_json(const Json& json, std::string_view where);

}  // namespace tapetune
