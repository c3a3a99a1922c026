#include "recipe/recipe.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>

#include "adapters/component.h"
#include "core/digits.h"
#include "core/error.h"
#include "core/file.h"
#include "core/nearest.h"
#include "recipe/schema.h"

namespace tapetune {

using namespace schema;

namespace {

using Kind = YamlNode::Kind;

// Reads the whole recipe before it complains.
class Reader {
 public:
  explicit Reader(std::string_view where) : where_(where) {}

  Recipe read(const std::string& text, std::span<const std::string> overrides) {
    const YamlNode root = parse_yaml(text, where_);
    if (root.kind != Kind::map) {
      fail("recipe", "{}:{}: a recipe is a map of keys, as \"steps: 1000\", but this is {}.", where_,
           std::max(root.line, 1), root.kind == Kind::null ? "empty" : shown(root));
    }
    for (const YamlNode& node : root.items) take(node.key, node);
    for (const std::string& each : overrides) override_with(each);
    Recipe recipe;
    recipe.version1 = version1_;
    apply(recipe);
    check(recipe);
    finish();
    return recipe;
  }

 private:
  struct Problem {
    int line;
    std::string text;
  };

  void report(const YamlNode& at, const std::string& text) { problems_.push_back({at.line, text}); }

  void finish() {
    if (problems_.empty()) return;
    const auto order = [](int line) { return line == 0 ? std::numeric_limits<int>::max() : line; };
    std::stable_sort(problems_.begin(), problems_.end(),
                     [&](const Problem& a, const Problem& b) { return order(a.line) < order(b.line); });
    std::vector<std::string> lines;
    for (Problem& problem : problems_) {
      for (char& c : problem.text) c = c == '\n' || c == '\r' ? ' ' : c;
      const std::string place = problem.line == 0 ? "command line" : fmt::format("{}:{}", where_, problem.line);
      lines.push_back(fmt::format("[recipe] {}: {}", place, problem.text));
    }
    throw Error(fmt::format("{}", fmt::join(lines, "\n")));
  }

  // --- a tree becomes entries under full names

  void take(const std::string& name, const YamlNode& node) {
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
      unknown(name, node);
    }
  }

  // An adapter that is no method's name too.
  static bool is_component(std::string_view word) {
    return adapter_components().get(word) != nullptr &&
           std::ranges::none_of(presets(), [&](const Preset& preset) { return preset.name == word; });
  }

  // Where a key of version 1 is now, which had the whole method under adapter.
  std::string today(const std::string& name, const YamlNode& node) {
    constexpr std::string_view before = "adapter.";
    if (!name.starts_with(before) || find_field(name) != nullptr) return name;
    const std::string key = name.substr(before.size());
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

  void put(const std::string& written, const YamlNode& node) {
    const std::string name = today(written, node);
    const auto [at, added] = entries_.emplace(name, node);
    if (added) return;
    if (node.line == 0) {
      at->second = node;
    } else {
      report(node, fmt::format("{} is given twice; the first is on line {}.", name, at->second.line));
    }
  }

  void unknown(const std::string& name, const YamlNode& node) {
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

  void override_with(const std::string& given) {
    const std::size_t equals = given.find('=');
    YamlNode node;
    if (equals == std::string::npos || equals == 0) {
      return report(node,
                    fmt::format("\"{}\" is not a setting; write key=value, for example steps=100.", shortened(given)));
    }
    const std::string name = given.substr(0, equals), value = given.substr(equals + 1);
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
      std::erase_if(entries_, [&](const auto& entry) {
        const bool moved = name == "adapter" && (entry.first == "method" || of_adapter_.contains(entry.first));
        return moved || entry.first == name || section_of(entry.first) == name;
      });
    }
    if (const std::string section = section_of(name); find_field(section) != nullptr) entries_.erase(section);
    if (node.kind == Kind::null && (find_field(name) != nullptr || is_section(name))) {
      entries_.erase(name);
    } else {
      take(name, node);
    }
  }

  static void forget_lines(YamlNode& node) {
    node.line = 0;
    for (YamlNode& item : node.items) forget_lines(item);
  }

  // --- entries become a recipe

  void apply(Recipe& recipe) {
    const bool from_scratch =
        std::any_of(entries_.begin(), entries_.end(), [](const auto& e) { return e.first.starts_with("model."); });
    if (from_scratch) random_model(recipe);
    if (const auto folder = entries_.find("model"); from_scratch && folder != entries_.end()) {
      wrong("model", folder->second, "model is both a folder and a map of keys; remove one of them.");
      entries_.erase(folder);
    }
    choose_method(recipe);
    for (const Field& field : fields()) {
      const std::string& name = field.key.name;
      const auto found = entries_.find(name);
      const bool of_model = section_of(name) == "model";
      if (found == entries_.end()) {
        if (field.needed && !(name == "model" && from_scratch) && !(of_model && !from_scratch)) missing(field);
        continue;
      }
      const YamlNode& node = found->second;
      if (node.kind == Kind::null) {
        if (field.optional || bad_.contains(name)) continue;
        wrong(name, node, fmt::format("{} has no value; give one, or remove the key.", name));
      } else if (!has_place(recipe, field, node)) {
        bad_.insert(name);
      } else {
        field.set(recipe, node, [&](const YamlNode& at, const std::string& text) { wrong(name, at, text); });
      }
    }
    unknown_settings(recipe);
  }

  void wrong(const std::string& name, const YamlNode& at, const std::string& text) {
    report(at, text);
    bad_.insert(name);
  }

  void missing(const Field& field) {
    YamlNode first;
    first.line = 1;
    wrong(field.key.name, first, fmt::format("{} is missing: {}.", field.key.name, field.key.help));
  }

  // Where a key of the method is in its settings; none: it is not the method's.
  static std::optional<Section> section_in_method(std::string_view name) {
    for (const Section section : {Section::adapter, Section::positions, Section::attention}) {
      if (name.starts_with(fmt::format("{}.", section_name(section)))) return section;
    }
    return name == "train_also" || name == "untie" ? std::optional(Section::top) : std::nullopt;
  }

  void choose_method(Recipe& recipe) {
    const auto found = entries_.find("method");
    std::string name = recipe.init ? "full" : "none";
    YamlNode at;
    at.line = 1;
    if (found != entries_.end()) {
      at = found->second;
      if (at.kind != Kind::scalar) return wrong("method", at, must_be("method", "a word", at));
      name = at.text;
    } else if (bad_.contains("adapter")) {
      bad_.insert("method");
      return;
    } else if (!recipe.init && !chooses_components()) {
      return wrong("method", at, "method is missing: name one, as \"method: tape\", or choose components in sections.");
    }
    try {
      recipe.method = parse_method(name, {});
    } catch (const Error& error) {
      return wrong("method", at, std::string(error.text()));
    }
    choose_components(recipe.method);
  }

  bool chooses_components() const {
    return std::ranges::any_of(entries_, [](const auto& entry) {
      return entry.first == "positions.encoding" || entry.first == "attention.pattern" || entry.first == "train_also" ||
             entry.first.starts_with("adapter.");
    });
  }

  // The key that names a section's component.
  static std::string choice_of(Section section) {
    return section == Section::positions ? "positions.encoding"
           : section == Section::adapter ? "adapter.type"
                                         : "attention.pattern";
  }

  // Which other keys there are depends on them.
  void choose_components(MethodOptions& method) {
    for (const Section section : {Section::positions, Section::adapter, Section::attention}) {
      const std::string full = choice_of(section), key(last_of(full));
      const auto found = entries_.find(full);
      if (found == entries_.end() || found->second.kind == Kind::null) continue;
      if (found->second.kind != Kind::scalar) {
        wrong(full, found->second, must_be(full, "a word", found->second));
        continue;
      }
      try {
        set_setting(method, section, key, found->second.text);
      } catch (const Error& error) {
        wrong(full, found->second, fmt::format("{}: {}", full, error.text()));
      }
    }
    constexpr std::string_view before = "adapter.";
    bool declined = false;
    for (const auto& [name, node] : entries_) {
      if (!name.starts_with(before) || node.kind != Kind::scalar) continue;
      if (choose_by_key(method, name.substr(before.size()), node.text)) declined = method.adapter.type == "none";
    }
    if (!declined) return;
    std::erase_if(entries_, [&](const auto& entry) {
      const auto& [name, node] = entry;
      if (!name.starts_with(before)) return false;
      const std::string key = name.substr(before.size());
      return choose_by_key(method, key, "0") || is_idle_setting(method, key, text_of(node));
    });
  }

  // Whether the method has such a setting; says so where it has not.
  bool has_place(const Recipe& recipe, const Field& field, const YamlNode& node) {
    const std::string& name = field.key.name;
    const std::optional<Section> section = section_in_method(name);
    if (!section) return true;
    // A component that there is not, and keys that it may have.
    if (bad_.contains(name) || (*section != Section::top && bad_.contains(choice_of(*section)))) return false;
    if (find_key(recipe.method, *section, last_of(name)) != nullptr) return true;
    if (bad_.contains("method")) return false;
    report(node, "method " + no_setting(recipe.method, *section, last_of(name)));
    return false;
  }

  // Keys under adapter that no adapter has.
  void unknown_settings(const Recipe& recipe) {
    for (const auto& [name, node] : entries_) {
      if (find_field(name) != nullptr || bad_.contains(choice_of(Section::adapter))) continue;
      const std::string setting = name.substr(std::string_view("adapter.").size());
      const auto elsewhere =
          std::ranges::find_if(method_keys_, [&](const MethodKey& key) { return key.key.name == setting; });
      if (elsewhere != method_keys_.end()) {
        report(node, fmt::format("{} does not belong under adapter; write {}.", setting, elsewhere->name()));
      } else if (bad_.contains("method")) {
        const std::vector<std::string_view> known = names_in("adapter");
        report(node, fmt::format("adapter has no setting \"{}\"; it takes {}{}.", shortened(setting),
                                 fmt::join(known, ", "), did_you_mean(setting, known)));
      } else {
        report(node, "method " + no_setting(recipe.method, Section::adapter, shortened(setting)));
      }
    }
  }

  // --- what cannot be together

  // Each was read and is right by itself.
  bool fine(std::initializer_list<std::string_view> names) const {
    return std::none_of(names.begin(), names.end(), [&](std::string_view name) {
      return bad_.contains(std::string(name)) || bad_.contains(section_of(name));
    });
  }

  // The first of these that was given.
  YamlNode at(std::initializer_list<std::string_view> names) const {
    for (const std::string_view name : names) {
      if (const auto found = entries_.find(std::string(name)); found != entries_.end()) return found->second;
    }
    YamlNode first;
    first.line = 1;
    return first;
  }

  void check(Recipe& recipe) {
    if (fine({"shard", "checkpointing"}) && recipe.shard == "base" && recipe.checkpointing == Checkpointing::off) {
      report(at({"shard", "checkpointing"}),
             "shard: base drops a layer's weights after its use, but without checkpointing the backward still needs "
             "them; set checkpointing: full or selective.");
    }
    check_schedule(recipe);
    if (fine({"eval_every", "held_out"}) && recipe.eval_every > 0 && recipe.held_out == 0) {
      report(at({"eval_every"}), "eval_every asks for evaluations, but held_out keeps no data for them; set held_out.");
    }
    if (fine({"method"})) check_method(recipe);
    if (recipe.init) check_random(recipe);
  }

  void check_schedule(const Recipe& recipe) {
    const auto& [kind, warmup, min_lr] = recipe.schedule;
    if (!fine({"schedule.kind"})) return;
    if (fine({"schedule.warmup", "steps"}) && kind != "constant" && warmup >= recipe.steps) {
      report(at({"schedule.warmup", "steps"}),
             fmt::format("schedule.warmup {} leaves nothing of {} for the {} schedule; shorten it.", warmup,
                         counted(recipe.steps, "step"), kind));
    }
    if (!fine({"schedule.min_lr", "optimizer.lr"})) return;
    if (kind == "constant" && min_lr > 0) {
      report(at({"schedule.min_lr"}), "schedule.min_lr has no effect in a constant schedule; remove it.");
    } else if (min_lr > recipe.optimizer.lr) {
      report(at({"schedule.min_lr"}),
             fmt::format("schedule.min_lr {} is above optimizer.lr {}; lower it.", min_lr, recipe.optimizer.lr));
    }
  }

  void check_method(Recipe& recipe) {
    MethodOptions& options = recipe.method;
    if (options.factor && !options.scaling) options.scaling = RopeType::linear;
    const bool trains = options.adapter.type != "none" || options.train_also.any() || learns_positions(options);
    if (!trains && fine({"positions.encoding", "adapter.type", "train_also"})) {
      wrong("method", at({"method"}),
            fmt::format("method {} has no trainable parameters; choose another.", options.name()));
    }
    RecipeFacts facts;
    if (fine({"context"})) facts.context = recipe.context;
    if (recipe.init && fine({"model.heads"})) facts.heads = recipe.init->heads;
    facts.base_trains = options.train_also.all;
    for (const MethodProblem& problem : method_problems(options, facts)) {
      const std::string key = problem.section == Section::top
                                  ? problem.key
                                  : fmt::format("{}.{}", section_name(problem.section), problem.key);
      if (fine({key})) report(at({key, "method"}), problem.message(true));
    }
  }

  static bool learns_positions(const MethodOptions& options) {
    const PositionComponent* encoding = position_components().get(options.positions.type);
    return encoding != nullptr && encoding->owns != nullptr;
  }

  void check_random(Recipe& recipe) {
    RandomModel& model = *recipe.init;
    if (!fine({"model.hidden", "model.heads", "model.kv_heads", "model.head_dim"})) return;
    if (model.kv_heads == 0) model.kv_heads = model.heads;
    if (model.heads % model.kv_heads != 0) {
      report(at({"model.kv_heads"}),
             fmt::format("model.kv_heads {} does not divide model.heads {}.", model.kv_heads, model.heads));
    }
    if (model.head_dim == 0 && model.hidden % model.heads != 0) {
      report(at({"model.heads"}), fmt::format("model.heads {} does not divide model.hidden {}; set model.head_dim.",
                                              model.heads, model.hidden));
      return;
    }
    if (model.head_dim == 0) model.head_dim = model.hidden / model.heads;
    if (model.head_dim % 2 != 0) {
      report(at({"model.head_dim", "model.heads"}),
             fmt::format("a head is {} wide, but rotary positions need an even number.", model.head_dim));
    }
  }

  static std::string text_of(const YamlNode& node) {
    if (node.kind == Kind::scalar) return node.text;
    std::vector<std::string> parts;
    for (const YamlNode& item : node.items) parts.push_back(item.text);
    return fmt::format("{}", fmt::join(parts, ","));
  }

  std::string where_;
  std::vector<MethodKey> method_keys_ = method_keys();
  std::map<std::string, YamlNode> entries_;
  std::set<std::string> of_adapter_;  // entries that a file of version 1 has under adapter
  bool version1_ = false;
  std::set<std::string> bad_;  // keys whose values cannot be relied on
  std::vector<Problem> problems_;
};

}  // namespace

std::span<const RecipeKey> recipe_keys() {
  static const std::vector<RecipeKey> keys = [] {
    std::vector<RecipeKey> all;
    for (const Field& field : fields()) {
      all.push_back(field.key);
    }
    return all;
  }();
  return keys;
}

Recipe parse_recipe(const std::string& text, std::string_view where, std::span<const std::string> overrides) {
  return Reader(where).read(text, overrides);
}

Recipe read_recipe(const std::filesystem::path& file, std::span<const std::string> overrides) {
  constexpr std::uintmax_t most = 1 << 20;
  std::error_code error;
  if (std::filesystem::is_directory(file, error)) fail("recipe", "{}: a folder; give a YAML file.", file.string());
  if (const std::uintmax_t size = std::filesystem::file_size(file, error); !error && size > most) {
    fail("recipe", "{}: {} bytes are too many for a recipe; give a YAML file.", file.string(), size);
  }
  return parse_recipe(read_text(file), file.string(), overrides);
}

std::string recipe_yaml(const Recipe& recipe, std::span<const std::string> comments) {
  Recipe copy = recipe;
  std::string text, section;
  for (const std::string& comment : comments) text += "# " + comment + "\n";
  for (const Field& field : fields()) {
    const std::string value = field.get(copy);
    if (value.empty()) continue;
    const std::string own = section_of(field.key.name);
    if (!own.empty() && own != section) text += own + ":\n";
    section = own;
    text += fmt::format("{}{}: {}\n", own.empty() ? "" : "  ", last_of(field.key.name), value);
  }
  return text;
}

std::vector<RecipeDifference> differences(const Recipe& before, const Recipe& after) {
  std::vector<RecipeDifference> list;
  Recipe first = before, second = after;
  // Without an end to steer for, more steps go on where fewer ended.
  const bool endless = before.schedule.kind == "constant" && after.schedule.kind == "constant";
  for (const Field& field : fields()) {
    const std::string a = field.get(first), b = field.get(second);
    if (a == b) continue;
    const bool affects_result = field.key.affects_result && !(endless && field.key.name == "steps");
    list.push_back({field.key.name, a.empty() ? "nothing" : a, b.empty() ? "nothing" : b, affects_result});
  }
  return list;
}

ModelConfig random_model_config(const Recipe& recipe) {
  const RandomModel& model = recipe.init.value();
  ModelConfig config;
  config.vocab_size = model.vocab;
  config.hidden_size = model.hidden;
  config.intermediate_size = model.ffn;
  config.layers = model.layers;
  config.heads = model.heads;
  config.kv_heads = model.kv_heads;
  config.head_dim = model.head_dim;
  config.rms_norm_eps = model.norm_eps;
  config.tied_embeddings = model.tied;
  // The method's scaling stretches the context to the recipe's.
  config.context =
      static_cast<std::int64_t>(std::ceil(static_cast<double>(recipe.context) / recipe.method.factor.value_or(1.0)));
  return config;
}

}  // namespace tapetune
