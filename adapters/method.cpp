#include "adapters/method.h"

#include <algorithm>
#include <array>

#include "adapters/component.h"
#include "core/error.h"
#include "core/nearest.h"

namespace tapetune {

namespace {

constexpr std::array<std::pair<RopeType, std::string_view>, 4> scalings{{{RopeType::standard, "none"},
                                                                         {RopeType::linear, "linear"},
                                                                         {RopeType::dynamic, "dynamic"},
                                                                         {RopeType::yarn, "yarn"}}};

// What chooses the component of a section.
const Key& choice_key(Section section) {
  static const std::array<Key, 3> keys{{{"type", "what is added to frozen projections", Key::Type::word},
                                        {"encoding", "how tokens know where they are", Key::Type::word},
                                        {"pattern", "which tokens attend to which during training", Key::Type::word}}};
  return keys.at(static_cast<std::size_t>(section));
}

// Keys that are no component's.
const std::vector<Key>& common_keys(Section section) {
  static const std::vector<Key> none,
      positions =
          [] {
            std::vector<Key> keys;
            keys.push_back({"scaling",
                            "RoPE scaling: none, linear, dynamic or yarn (default: the model's own)",
                            Key::Type::word,
                            Json(),
                            0,
                            0,
                            "",
                            {"none", "linear", "dynamic", "yarn"}});
            keys.push_back({"factor", "scaling factor of the context", Key::Type::number, Json(), 1.0, 1e6,
                            "a number from 1 to 1e6"});
            keys.push_back({"theta", "rope_theta", Key::Type::number, Json(), 1.000001, 1e18, "a number above 1"});
            return keys;
          }(),
      attention =
          [] {
            std::vector<Key> keys;
            keys.push_back({"window",
                            "sliding windows: model, as its config has them, or none",
                            Key::Type::word,
                            "model",
                            0,
                            0,
                            "",
                            {"model", "none"}});
            return keys;
          }(),
      top = [] {
        std::vector<Key> keys;
        keys.push_back({"train_also",
                        "weights of the base that train: embeddings,norms,lm_head, or all",
                        Key::Type::words,
                        Json(),
                        0,
                        0,
                        "",
                        {"embeddings", "norms", "lm_head", "all"}});
        keys.push_back({"untie", "separate lm_head from the embeddings where they are tied", Key::Type::flag, false});
        return keys;
      }();
  return section == Section::positions   ? positions
         : section == Section::attention ? attention
         : section == Section::top       ? top
                                         : none;
}

constexpr Section with_components[] = {Section::adapter, Section::positions, Section::attention};

const Settings& settings_of(const MethodOptions& options, Section section) {
  return section == Section::adapter     ? options.adapter
         : section == Section::positions ? options.positions
                                         : options.attention;
}

Settings& settings_of(MethodOptions& options, Section section) {
  return const_cast<Settings&>(settings_of(std::as_const(options), section));
}

// Calls use(component) for each of a section.
template <typename Use>
void for_each_component(Section section, const Use& use) {
  const auto each = [&](const auto& registry) {
    for (const auto& component : registry.all()) use(component);
  };
  if (section == Section::adapter) each(adapter_components());
  if (section == Section::positions) each(position_components());
  if (section == Section::attention) each(pattern_components());
}

const std::vector<Key>& component_keys(const MethodOptions& options, Section section) {
  static const std::vector<Key> none;
  const std::vector<Key>* keys = &none;
  if (section == Section::top) return none;
  const std::string& type = settings_of(options, section).type;
  for_each_component(section, [&](const auto& component) {
    if (component.name == type) keys = &component.keys;
  });
  return *keys;
}

bool has_rope(const MethodOptions& options) {
  const PositionComponent* encoding = position_components().get(options.positions.type);
  return encoding == nullptr || encoding->rotates;  // the base's own may be any
}

// The adapter that a key of its own chooses.
const AdapterComponent* chosen_by(std::string_view key) {
  for (const AdapterComponent& component : adapter_components().all()) {
    if (!component.chosen_by.empty() && component.chosen_by == key) return &component;
  }
  return nullptr;
}

void choose(MethodOptions& options, Section section, std::string_view name) {
  Settings& settings = settings_of(options, section);
  if (section == Section::positions && name == base_positions) {
    settings = {std::string(base_positions), Json::object()};
    return;
  }
  if (section == Section::adapter) settings = default_settings(name, adapter_components().find(name).keys);
  if (section == Section::attention) settings = default_settings(name, pattern_components().find(name).keys);
  if (section == Section::positions) settings = default_settings(name, position_components().find(name).keys);
}

TrainAlso train_also_from(const Json& words) {
  TrainAlso also;
  for (const Json& word : words.is_null() ? Json::array() : words) {
    also.embeddings = also.embeddings || word == "embeddings";
    also.norms = also.norms || word == "norms";
    also.head = also.head || word == "lm_head";
    also.all = also.all || word == "all";
  }
  return also;
}

Json train_also_json(const TrainAlso& also) {
  Json words = Json::array();
  if (also.all) words.push_back("all");
  if (also.embeddings) words.push_back("embeddings");
  if (also.norms) words.push_back("norms");
  if (also.head) words.push_back("lm_head");
  return words;
}

std::string_view scaling_word(RopeType type) {
  return std::ranges::find(scalings, type, &std::pair<RopeType, std::string_view>::first)->second;
}

MethodOptions preset_options(std::string_view name) {
  MethodOptions options;
  find_preset(name).set(options);
  return options;
}

// A setting by one of its names: "adapter.rank" or, where one section has it, "rank".
struct Named {
  std::optional<Section> section;
  std::string_view key;
};
Named named(std::string_view name) {
  for (const Section section : with_components) {
    const std::string prefix = fmt::format("{}.", section_name(section));
    if (name.starts_with(prefix)) return {section, name.substr(prefix.size())};
  }
  return {std::nullopt, name};
}

bool is_choice(const Named& name) {
  if (name.section) return choice_key(*name.section).name == name.key;
  return name.key == "encoding" || name.key == "pattern";
}

}  // namespace

std::string MethodOptions::name() const {
  if (preset != "none") return preset;
  std::vector<std::string> parts;
  if (positions.type != base_positions) parts.push_back(positions.type);
  if (adapter.type != "none") parts.push_back(adapter.type);
  if (attention.type != "full") parts.push_back(attention.type);
  if (train_also.all) parts.emplace_back("full");
  return parts.empty() ? preset : fmt::format("{}", fmt::join(parts, " + "));
}

std::string_view section_name(Section section) {
  constexpr std::string_view names[] = {"adapter", "positions", "attention", ""};
  return names[static_cast<std::size_t>(section)];
}

std::string MethodKey::name() const {
  return section == Section::top ? std::string(key.name) : fmt::format("{}.{}", section_name(section), key.name);
}

std::vector<MethodKey> method_keys() {
  std::vector<MethodKey> all;
  for (const Section section : {Section::positions, Section::adapter, Section::attention}) {
    Key choice = choice_key(section);
    std::vector<MethodKey> own;
    if (section == Section::positions) choice.words.push_back(base_positions);
    for_each_component(section, [&](const auto& component) {
      choice.words.push_back(component.name);
      for (const Key& key : component.keys) {
        const auto same = std::ranges::find_if(own, [&](const MethodKey& k) { return k.key.name == key.name; });
        if (same == own.end()) {
          own.push_back({section, key, {component.name}});
        } else {
          same->components.push_back(component.name);
        }
      }
    });
    choice.fallback = settings_of(MethodOptions(), section).type;
    all.push_back({section, choice, {}});
    all.insert(all.end(), own.begin(), own.end());
    for (const Key& key : common_keys(section)) all.push_back({section, key, {}});
  }
  for (const Key& key : common_keys(Section::top)) all.push_back({Section::top, key, {}});
  return all;
}

const Key* find_key(const MethodOptions& options, Section section, std::string_view key) {
  if (section != Section::top && choice_key(section).name == key) return &choice_key(section);
  for (const Key& each : component_keys(options, section)) {
    if (each.name == key) return &each;
  }
  if (section == Section::positions && !has_rope(options)) return nullptr;
  for (const Key& each : common_keys(section)) {
    if (each.name == key) return &each;
  }
  return nullptr;
}

std::optional<Section> section_of_key(const MethodOptions& options, std::string_view key) {
  for (const Section section : {Section::adapter, Section::positions, Section::attention, Section::top}) {
    if (section != Section::top && choice_key(section).name == key && !is_choice({std::nullopt, key})) continue;
    if (find_key(options, section, key) != nullptr) return section;
  }
  return std::nullopt;
}

Json get_setting(const MethodOptions& options, Section section, std::string_view key) {
  if (section == Section::top) {
    return key == "untie" ? Json(options.untie) : train_also_json(options.train_also);
  }
  const Settings& settings = settings_of(options, section);
  if (choice_key(section).name == key) return settings.type;
  if (section == Section::positions && key == "scaling") {
    return options.scaling ? Json(scaling_word(*options.scaling)) : Json();
  }
  if (section == Section::positions && key == "factor") return options.factor ? Json(*options.factor) : Json();
  if (section == Section::positions && key == "theta") return options.theta ? Json(*options.theta) : Json();
  if (section == Section::attention && key == "window") return options.window ? "model" : "none";
  const auto found = settings.values.find(key);
  return found == settings.values.end() ? Json() : *found;
}

void set_setting(MethodOptions& options, Section section, std::string_view key, std::string_view text) {
  const Key* known = find_key(options, section, key);
  if (known == nullptr) fail("method", "{}", no_setting(options, section, key));
  if (section != Section::top && known == &choice_key(section)) return choose(options, section, text);
  Json value = parse_value(*known, text);
  if (section == Section::top) {
    if (key == "untie") {
      options.untie = value.get<bool>();
    } else {
      options.train_also = value.is_null() ? preset_options(options.preset).train_also : train_also_from(value);
    }
  } else if (section == Section::positions && key == "scaling") {
    options.scaling =
        std::ranges::find(scalings, value.get<std::string>(), &std::pair<RopeType, std::string_view>::second)->first;
  } else if (section == Section::positions && key == "factor") {
    options.factor = value.get<double>();
  } else if (section == Section::positions && key == "theta") {
    options.theta = value.get<double>();
  } else if (section == Section::attention && key == "window") {
    options.window = value == "model";
  } else {
    settings_of(options, section).values[std::string(key)] = std::move(value);
  }
}

bool choose_by_key(MethodOptions& options, std::string_view key, std::string_view text) {
  if (options.adapter.type != "none") return false;
  const AdapterComponent* component = chosen_by(key);
  if (component == nullptr) return false;
  if (text != "0") choose(options, Section::adapter, component->name);
  return true;
}

bool is_idle_setting(const MethodOptions& options, std::string_view key, std::string_view text) {
  if (options.adapter.type != "none") return false;
  for (const AdapterComponent& component : adapter_components().all()) {
    if (component.chosen_by.empty()) continue;
    for (const Key& each : component.keys) {
      if (each.name == key) return text.empty() || parse_value(each, text) == each.fallback;
    }
  }
  return false;
}

std::optional<Section> section_since_version2(std::string_view key) {
  std::optional<Section> found;
  for (const Section section : with_components) {
    for_each_component(section, [&](const auto& component) {
      const bool has = std::ranges::any_of(component.keys, [&](const Key& each) { return each.name == key; });
      if (has && !found) found = section;
    });
  }
  return found;
}

std::string no_setting(const MethodOptions& options, Section section, std::string_view key) {
  const std::string name = options.name();
  if (options.adapter.type == "none" && (section == Section::adapter || section == Section::top)) {
    for (const AdapterComponent& component : adapter_components().all()) {
      const bool has = std::ranges::any_of(component.keys, [&](const Key& each) { return each.name == key; });
      if (has && !component.chosen_by.empty()) return fmt::format("{} {}", name, component.not_chosen);
    }
  }
  std::vector<std::string_view> own;
  const auto add = [&](const std::vector<Key>& keys) {
    for (const Key& each : keys) own.push_back(each.name);
  };
  const auto all_of = [&](Section each) {
    if (each != Section::top && section != Section::top) own.push_back(choice_key(each).name);
    add(component_keys(options, each));
    if (each == Section::adapter && options.adapter.type == "none") {
      for (const AdapterComponent& component : adapter_components().all()) {
        if (!component.chosen_by.empty()) own.push_back(component.chosen_by);
      }
    }
    if (each != Section::positions || has_rope(options)) add(common_keys(each));
  };
  if (section == Section::top) {
    for (const Section each : {Section::adapter, Section::positions, Section::attention, Section::top}) all_of(each);
  } else {
    all_of(section);
  }
  return fmt::format("{} has no setting \"{}\"; it takes {}{}.", name, key, fmt::join(own, ", "),
                     did_you_mean(key, own));
}

MethodOptions parse_method(std::string_view preset, std::span<const std::string> overrides) {
  MethodOptions options;
  find_preset(preset).set(options);
  options.preset = preset;
  struct Word {
    Named name;
    std::string_view value;
    bool done = false;
  };
  std::vector<Word> words;
  for (const std::string& word : overrides) {
    const std::size_t equals = word.find('=');
    if (equals == std::string::npos) {
      fail("method", "\"{}\" is not a setting; write key=value, for example rank=8.", word);
    }
    const std::string_view text = word;
    words.push_back({named(text.substr(0, equals)), text.substr(equals + 1)});
  }
  // Components first: which keys there are depends on them.
  for (Word& word : words) {
    if (!is_choice(word.name)) continue;
    const Section section =
        word.name.section.value_or(word.name.key == "encoding" ? Section::positions : Section::attention);
    set_setting(options, section, word.name.key, word.value);
    word.done = true;
  }
  const auto of_adapter = [](const Word& word) {
    return word.name.section.value_or(Section::adapter) == Section::adapter;
  };
  bool declined = false;
  for (Word& word : words) {
    if (word.done || !of_adapter(word) || !choose_by_key(options, word.name.key, word.value)) continue;
    word.done = declined = options.adapter.type == "none";
  }
  for (const Word& word : words) {
    if (word.done || (declined && of_adapter(word) && is_idle_setting(options, word.name.key, word.value))) continue;
    const std::optional<Section> section =
        word.name.section ? word.name.section : section_of_key(options, word.name.key);
    if (!section) fail("method", "{}", no_setting(options, Section::top, word.name.key));
    set_setting(options, *section, word.name.key, word.value);
  }
  check_method(options, {});
  return options;
}

std::string MethodProblem::message(bool with_section) const {
  if (key.empty()) return text;
  const bool named = with_section && section != Section::top;
  return fmt::format("{}{}{}{}", named ? section_name(section) : "", named ? "." : "", key, text);
}

std::vector<MethodProblem> method_problems(const MethodOptions& options, const RecipeFacts& facts) {
  std::vector<MethodProblem> all;
  const auto check = [&](Section section, const auto& component) {
    if (component.check == nullptr) return;
    for (const Problem& problem : component.check(settings_of(options, section), facts)) {
      all.push_back({section, problem.key, problem.key.empty() ? problem.text : " " + problem.text});
    }
  };
  const bool scaled = options.scaling && *options.scaling != RopeType::standard;
  if (scaled && !options.factor) {
    all.push_back(
        {Section::positions, "scaling",
         fmt::format("={} needs a factor; add factor=2 for twice the context.", scaling_word(*options.scaling))});
  } else if (options.scaling && !scaled && options.factor) {
    all.push_back({Section::positions, "scaling", "=none takes no factor; drop one of them."});
  }
  if (preset_options(options.preset).train_also.all && !options.train_also.all) {
    all.push_back({Section::top, "train_also",
                   fmt::format(": method {} trains everything already; remove train_also.", options.preset)});
  }
  if (options.positions.type != base_positions) {
    check(Section::positions, position_components().find(options.positions.type));
  }
  check(Section::adapter, adapter_components().find(options.adapter.type));
  check(Section::attention, pattern_components().find(options.attention.type));
  return all;
}

void check_method(const MethodOptions& options, const RecipeFacts& facts) {
  for (const MethodProblem& problem : method_problems(options, facts)) fail("method", "{}", problem.message(false));
}

std::vector<std::pair<std::string, std::string>> shown_settings(const MethodOptions& options) {
  std::vector<std::pair<std::string, std::string>> all;
  const MethodOptions usual = preset_options(options.preset);
  for (const MethodKey& each : method_keys()) {
    if (find_key(options, each.section, each.key.name) == nullptr) continue;
    const Json value = get_setting(options, each.section, each.key.name);
    const bool common = each.components.empty();
    if (value.is_null() || (common && value == get_setting(usual, each.section, each.key.name))) continue;
    const bool clear = section_of_key(options, each.key.name) == each.section;
    all.emplace_back(clear ? each.key.name : each.name(), value_text(value));
  }
  return all;
}

Json method_json(const MethodOptions& options) {
  Json json;
  json["format"] = 2;
  json["method"] = options.preset;
  for (const Section section : with_components) {
    Json own = settings_json(choice_key(section).name, settings_of(options, section));
    for (const Key& key : common_keys(section)) {
      if (Json value = get_setting(options, section, key.name); !value.is_null()) own[std::string(key.name)] = value;
    }
    json[std::string(section_name(section))] = own;
  }
  for (const Key& key : common_keys(Section::top)) {
    json[std::string(key.name)] = get_setting(options, Section::top, key.name);
  }
  return json;
}

ReadMethod method_from_json(const Json& json, std::string_view where) {
  if (!json.is_object() || !json.contains("method") || !json["method"].is_string()) {
    fail("adapter", "{}: must be an object with a method.", where);
  }
  const bool version1 = !json.contains("format");
  if (!version1 && json["format"] != 2) {
    fail("adapter", "{}: format {} is of a later version of tapetune; this one reads up to 2.", where,
         to_text(json["format"]));
  }
  std::vector<std::string> overrides;
  const auto add = [&](const std::string& prefix, const Json& object) {
    for (const auto& [key, value] : object.items()) {
      if (value.is_null() || value.is_object() || (prefix.empty() && (key == "method" || key == "format"))) continue;
      overrides.push_back(fmt::format("{}{}={}", prefix, key, value_text(value)));
    }
  };
  for (const Section section : with_components) {
    const std::string name(section_name(section));
    if (json.contains(name) && json[name].is_object()) add(name + ".", json[name]);
  }
  add("", json);
  ReadMethod read{{}, version1};
  try {
    read.options = parse_method(json["method"].get<std::string>(), overrides);
  } catch (const Error& error) {
    fail("adapter", "{}: {}", where, error.text());
  }
  // Version 1 had no windows.
  if (version1) read.options.window = false;
  return read;
}

}  // namespace tapetune
