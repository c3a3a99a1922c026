#include "recipe/schema.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <type_traits>

#include "adapters/adapter.h"
#include "core/nearest.h"
#include "data/utf8.h"

namespace tapetune::schema {

namespace {

using Kind = YamlNode::Kind;

constexpr std::int64_t large = std::int64_t{1} << 31;
constexpr double huge = 1e12;

// A value within a recipe.
template <typename T>
using Access = std::function<T&(Recipe&)>;

template <typename T>
Access<T> in(T Recipe::* member) {
  return [=](Recipe& recipe) -> T& { return recipe.*member; };
}

template <typename Outer, typename T, typename Part>
Access<T> in(Outer outer, T Part::* member) {
  return [=](Recipe& recipe) -> T& { return outer(recipe).*member; };
}

template <typename T>
bool parse_number(std::string_view text, T& value) {
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && rest == text.data() + text.size();
}

std::vector<std::string> split(std::string_view text) {
  std::vector<std::string> parts;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find(','), text.size());
    if (end > 0) parts.emplace_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return parts;
}

// A list as it stands, or the "a,b" of a command line. Nothing where it is neither.
std::optional<std::vector<std::string>> as_list(const YamlNode& node) {
  if (node.kind == Kind::scalar) return split(node.text);
  if (node.kind != Kind::list) return std::nullopt;
  std::vector<std::string> parts;
  for (const YamlNode& item : node.items) {
    if (item.kind != Kind::scalar) return std::nullopt;
    parts.push_back(item.text);
  }
  return parts;
}

std::string yaml_list(const std::vector<std::string>& parts) {
  std::vector<std::string> scalars;
  scalars.reserve(parts.size());
  for (const std::string& part : parts) scalars.push_back(yaml_scalar(part));
  return fmt::format("[{}]", fmt::join(scalars, ", "));
}

// --- kinds of keys ---------------------------------------------------------------------------------------------------

template <typename T>
Field number(std::string name, Access<T> access, T least, T most, std::string rule, std::string help) {
  const std::string type = std::is_integral_v<T> ? "whole number" : "number";
  const auto set = [=](Recipe& recipe, const YamlNode& node, const Report& report) {
    T value{};
    const bool readable = node.kind == Kind::scalar && parse_number(node.text, value);
    if (std::is_integral_v<T> && readable && value > most) {
      return report(node, must_be(name, fmt::format("at most {}", most), node));
    }
    if (!readable || !(value >= least && value <= most)) {
      const std::string_view kind = std::is_integral_v<T> ? "an integer" : "a number";
      return report(node, must_be(name, fmt::format("{} {}", kind, rule), node));
    }
    access(recipe) = value;
  };
  const auto get = [=](Recipe& recipe) { return fmt::format("{}", access(recipe)); };
  return {{name, type, "", rule, std::move(help), true}, set, get};
}

Field whole(std::string name, Access<std::int64_t> access, std::int64_t least, std::string help) {
  return number<std::int64_t>(std::move(name), access, least, large, fmt::format(">= {}", least), std::move(help));
}

Field above_zero(std::string name, Access<double> access, std::string help) {
  return number<double>(std::move(name), access, std::numeric_limits<double>::denorm_min(), huge, "above 0",
                        std::move(help));
}

Field from_zero(std::string name, Access<double> access, std::string help) {
  return number<double>(std::move(name), access, 0.0, huge, ">= 0", std::move(help));
}

Field share(std::string name, Access<double> access, std::string help) {
  return number<double>(std::move(name), access, 0.0, std::nextafter(1.0, 0.0), "from 0 to below 1", std::move(help));
}

Field flag(std::string name, Access<bool> access, std::string help) {
  const auto set = [=](Recipe& recipe, const YamlNode& node, const Report& report) {
    const auto is = [&](std::initializer_list<std::string_view> words) {
      return node.kind == Kind::scalar && std::find(words.begin(), words.end(), node.text) != words.end();
    };
    if (!is({"true", "yes", "1", "false", "no", "0"})) return report(node, must_be(name, "true or false", node));
    access(recipe) = is({"true", "yes", "1"});
  };
  const auto get = [=](Recipe& recipe) { return fmt::format("{}", access(recipe)); };
  return {{name, "true or false", "", "", std::move(help), true}, set, get};
}

Field text(std::string name, Access<std::string> access, std::string type, std::string help) {
  const auto set = [=](Recipe& recipe, const YamlNode& node, const Report& report) {
    if (node.kind != Kind::scalar || node.text.empty()) return report(node, must_be(name, "a " + type, node));
    access(recipe) = node.text;
  };
  return {
      {name, type, "", "", std::move(help), true}, set, [=](Recipe& recipe) { return yaml_scalar(access(recipe)); }};
}

// One of some words; `use` is told which.
Field word(std::string name, std::vector<std::string_view> words, std::string help,
           std::function<void(Recipe&, std::size_t)> use, std::function<std::size_t(Recipe&)> which) {
  const std::string rule = fmt::format("{}", fmt::join(words, ", "));
  const auto set = [=](Recipe& recipe, const YamlNode& node, const Report& report) {
    const auto found = std::find(words.begin(), words.end(), node.text);
    if (node.kind != Kind::scalar || found == words.end()) {
      return report(node, fmt::format("{} must be one of {}, but is {}{}.", name, rule, shown(node),
                                      node.kind == Kind::scalar ? hint(node.text, words) : ""));
    }
    use(recipe, static_cast<std::size_t>(found - words.begin()));
  };
  const auto get = [=](Recipe& recipe) { return std::string(words[which(recipe)]); };
  return {{name, "word", "", rule, std::move(help), true}, set, get};
}

Field word(std::string name, Access<std::string> access, const std::vector<std::string_view>& words, std::string help) {
  return word(
      std::move(name), words, std::move(help),
      [=](Recipe& recipe, std::size_t i) { access(recipe) = std::string(words[i]); },
      [=](Recipe& recipe) {
        return static_cast<std::size_t>(std::find(words.begin(), words.end(), access(recipe)) - words.begin());
      });
}

Field with_fallback(std::string fallback, Field field) {
  field.key.fallback = std::move(fallback);
  return field;
}

Field needed(Field field) {
  field.needed = true;
  return field;
}

// A text that may be absent.
Field optional(Field field) {
  field.optional = true;
  field.set = [set = field.set](Recipe& recipe, const YamlNode& node, const Report& report) {
    if (node.kind != Kind::scalar || !node.text.empty()) set(recipe, node, report);
  };
  field.get = [get = field.get](Recipe& recipe) {
    const std::string value = get(recipe);
    return value == yaml_scalar("") ? "null" : value;
  };
  return field;
}

Field resume_safe(Field field) {
  field.key.affects_result = false;
  return field;
}

// --- keys of a shape of their own ------------------------------------------------------------------------------------

Field model_field() {
  Field field =
      needed(text("model", in(&Recipe::model), "folder",
                  "Hugging Face folder of the base model; or a map of the keys below, to train from scratch"));
  field.get = [get = field.get](Recipe& recipe) { return recipe.init ? "" : get(recipe); };
  field.set = [set = field.set](Recipe& recipe, const YamlNode& node, const Report& report) {
    if (node.kind == Kind::scalar && count_invalid_utf8(node.text) != 0) {
      return report(node, must_be("model", "a folder whose path is UTF-8, so that recipe.yaml can record it", node));
    }
    set(recipe, node, report);
  };
  return field;
}

Field model_hash_field() {
  Field field = with_fallback("null", optional(text("model_hash", in(&Recipe::model_hash), "hash",
                                                    "what the model's weights must be; a run folder's recipe has it")));
  field.get = [get = field.get](Recipe& recipe) { return recipe.init ? "" : get(recipe); };
  field.set = [set = field.set](Recipe& recipe, const YamlNode& node, const Report& report) {
    if (node.kind == Kind::scalar && !node.text.starts_with("blake3-")) {
      return report(node, must_be("model_hash", "a hash that begins with blake3-", node));
    }
    set(recipe, node, report);
  };
  return field;
}

Field init_field() {
  return word(
      "model.init", {"random"}, "initialize the weights randomly, to train from scratch",
      [](Recipe& recipe, std::size_t) { random_model(recipe); }, [](Recipe&) { return std::size_t{0}; });
}

Field checkpointing_field() {
  return word(
      "checkpointing", {"off", "full", "selective"}, "which activations are recomputed in the backward pass",
      [](Recipe& recipe, std::size_t i) { recipe.checkpointing = static_cast<Checkpointing>(i); },
      [](Recipe& recipe) { return static_cast<std::size_t>(recipe.checkpointing); });
}

// Of a model without weights.
Field of_random(Field field) {
  field.get = [get = field.get](Recipe& recipe) { return recipe.init ? get(recipe) : ""; };
  return field;
}

void set_data(Recipe& recipe, const YamlNode& node, const Report& report) {
  const std::string what = "a token file or text, a list of them, or a list of {path: FILE, weight: NUMBER}";
  const auto one = [&](const YamlNode& item) {
    DataSource file;
    if (item.kind == Kind::scalar) {
      file.path = item.text;
    } else if (item.kind == Kind::map) {
      for (const YamlNode& entry : item.items) {
        if (entry.key == "path" && entry.kind == Kind::scalar) {
          file.path = entry.text;
        } else if (entry.key == "path") {
          return report(entry, must_be("data's path", "a file", entry));
        } else if (entry.key != "weight") {
          return report(entry, fmt::format("data has no key \"{}\"; an entry takes path and weight{}.",
                                           shortened(entry.key), hint(entry.key, {"path", "weight"})));
        } else if (entry.kind != Kind::scalar || !parse_number(entry.text, file.weight) ||
                   !(file.weight > 0 && file.weight <= huge)) {
          return report(entry, must_be("data's weight", "a number above 0", entry));
        }
      }
    } else {
      return report(item, must_be("data", what, item));
    }
    if (file.path.empty()) return report(item, "data has an entry without a path; name a token file or text.");
    const auto same = [&](const DataSource& other) { return other.path == file.path; };
    if (std::any_of(recipe.data.begin(), recipe.data.end(), same)) {
      return report(item, fmt::format("data names {} twice; give it a weight instead.", file.path));
    }
    recipe.data.push_back(file);
  };
  recipe.data.clear();
  if (node.kind == Kind::list) {
    for (const YamlNode& item : node.items) one(item);
    if (node.items.empty()) report(node, "data is an empty list; name a token file or text.");
  } else {
    one(node);
  }
}

std::string get_data(Recipe& recipe) {
  const auto plain = [](const DataSource& file) { return file.weight == 1.0; };
  std::vector<std::string> items;
  items.reserve(recipe.data.size());
  for (const DataSource& file : recipe.data) {
    items.push_back(plain(file) ? yaml_scalar(file.path)
                                : fmt::format("{{path: {}, weight: {}}}", yaml_scalar(file.path), file.weight));
  }
  if (items.size() == 1) return items[0];
  return fmt::format("[{}]", fmt::join(items, ", "));
}

void set_betas(Recipe& recipe, const YamlNode& node, const Report& report) {
  const auto parts = as_list(node);
  double values[2] = {-1, -1};
  const auto in_range = [](double value) { return value >= 0 && value < 1; };
  if (!parts || parts->size() != 2 || !parse_number((*parts)[0], values[0]) || !parse_number((*parts)[1], values[1]) ||
      !in_range(values[0]) || !in_range(values[1])) {
    return report(node, must_be("optimizer.betas", "two numbers from 0 to below 1, as [0.9, 0.999]", node));
  }
  recipe.optimizer.beta1 = values[0];
  recipe.optimizer.beta2 = values[1];
}

std::string get_betas(Recipe& recipe) {
  return fmt::format("[{}, {}]", recipe.optimizer.beta1, recipe.optimizer.beta2);
}

bool is_list(const MethodKey& key) {
  return key.name == "targets" || key.name == "train_also" || key.name == "layers_to_transform" ||
         key.name == "exclude_modules";
}

std::string method_value(const MethodKey& key, const MethodOptions& options) {
  const Json value = key.get(options);
  if (is_list(key) && value.is_string()) return yaml_list(split(value.get<std::string>()));
  if (value.is_string()) return yaml_scalar(value.get<std::string>());
  return value.is_number_float() ? fmt::format("{}", value.get<double>()) : to_text(value);
}

std::string method_type(const MethodKey& key) {
  if (is_list(key)) return "list";
  const Json value = key.get(MethodOptions{});
  if (value.is_boolean()) return "true or false";
  if (value.is_number_integer()) return "whole number";
  return value.is_number() || (value.is_null() && key.name != "scaling") ? "number" : "word";
}

// A setting of adapters/options.h under the name that it has in a recipe.
Field method_field(std::string_view setting_name) {
  const std::string name = recipe_name(setting_name);
  const MethodKey& setting = *std::find_if(method_keys().begin(), method_keys().end(),
                                           [&](const MethodKey& key) { return key.name == setting_name; });
  std::vector<std::string_view> who;
  const std::string usual = method_value(setting, MethodOptions{});
  std::string fallback = usual;
  for (const Method& method : methods()) {
    if (method.name == "none" || !takes(method.name, setting.name)) continue;
    who.push_back(method.name);
    const std::string own = method_value(setting, parse_method(method.name, {}));
    if (own != usual) fallback += fmt::format(" ({}: {})", method.name, own);
  }
  const bool all = who.size() + 1 == methods().size();  // but none
  Field field;
  field.key = {name,
               method_type(setting),
               fallback,
               all ? "" : fmt::format("{}", fmt::join(who, ", ")),
               std::string(setting.help),
               true};
  field.optional = usual == "null";
  field.set = [name, &setting](Recipe& recipe, const YamlNode& node, const Report& report) {
    const auto parts = as_list(node);
    if (!parts) return report(node, must_be(name, "a " + method_type(setting), node));
    const std::string value = node.kind == Kind::scalar ? node.text : fmt::format("{}", fmt::join(*parts, ","));
    try {
      setting.set(recipe.method, value);
    } catch (const Error& error) {
      const std::string prefix = name.substr(0, name.size() - setting.name.size());
      report(node, prefix + bare(error));
    }
  };
  field.get = [&setting](Recipe& recipe) {
    return takes(recipe.method.method, setting.name) ? method_value(setting, recipe.method) : "";
  };
  return field;
}

Field adapter_method() {
  std::vector<std::string_view> names;
  for (const Method& method : methods()) {
    if (method.name != "none") names.push_back(method.name);
  }
  Field field;
  field.key = {"adapter.method",
               "word",
               "required; full from scratch",
               fmt::format("{}", fmt::join(names, ", ")),
               "the method; adapter: NAME is short for it",
               true};
  field.set = [](Recipe&, const YamlNode&, const Report&) {};  // read before the others, which depend on it
  field.get = [](Recipe& recipe) { return recipe.method.method; };
  return field;
}

// --- the schema ------------------------------------------------------------------------------------------------------

std::vector<Field> make_fields() {
  const auto of_model = [](auto member) { return in(&random_model, member); };
  std::vector<Field> all{
      model_field(),
      needed(of_random(init_field())),
      needed(of_random(whole("model.hidden", of_model(&RandomModel::hidden), 1, "hidden size"))),
      needed(of_random(whole("model.layers", of_model(&RandomModel::layers), 1, "number of layers"))),
      needed(of_random(whole("model.heads", of_model(&RandomModel::heads), 1, "attention heads"))),
      with_fallback("as heads",
                    of_random(whole("model.kv_heads", of_model(&RandomModel::kv_heads), 1, "key/value heads"))),
      with_fallback("hidden / heads",
                    of_random(whole("model.head_dim", of_model(&RandomModel::head_dim), 1, "size of a head"))),
      needed(of_random(whole("model.ffn", of_model(&RandomModel::ffn), 1, "intermediate size of the MLP"))),
      needed(of_random(whole("model.vocab", of_model(&RandomModel::vocab), 1, "vocabulary size"))),
      of_random(above_zero("model.norm_eps", of_model(&RandomModel::norm_eps), "epsilon of RMSNorm")),
      of_random(flag("model.tied", of_model(&RandomModel::tied), "tied embeddings")),
      of_random(optional(text("model.tokenizer", of_model(&RandomModel::tokenizer), "folder",
                              "where the tokenizer of the trained model comes from"))),
      model_hash_field(),
      needed({{"data", "file or list", "", "", "token files or text, each FILE or {path: FILE, weight: NUMBER}", true},
              set_data,
              get_data}),
      resume_safe(needed(text("run", in(&Recipe::run), "folder", "the run folder"))),
      needed(whole("context", in(&Recipe::context), 2, "tokens per training sequence")),
  };
  const std::span<const MethodKey> settings = method_keys();
  for (const std::string_view name : {"scaling", "factor", "theta"}) all.push_back(method_field(name));
  all.push_back(adapter_method());
  for (const MethodKey& key : settings) {
    if (recipe_name(key.name).starts_with("adapter.")) all.push_back(method_field(key.name));
  }
  for (const std::string_view name : {"train_also", "untie"}) all.push_back(method_field(name));

  using Optimizer = Recipe::Optimizer;
  using Schedule = Recipe::Schedule;
  const auto of_optimizer = [](auto member) { return in(in(&Recipe::optimizer), member); };
  const auto of_schedule = [](auto member) { return in(in(&Recipe::schedule), member); };
  const Field rest[] = {
      optional(text("init_from", in(&Recipe::init_from), "folder",
                    "adapter to start from, instead of the method's initialization")),
      needed(whole("steps", in(&Recipe::steps), 1, "optimizer steps")),
      whole("batch", in(&Recipe::batch), 1, "sequences per step, over all ranks"),
      resume_safe(whole("micro_batch", in(&Recipe::micro_batch), 1, "most sequences computed at once on a rank")),
      from_zero("optimizer.lr", of_optimizer(&Optimizer::lr), "peak learning rate (AdamW)"),
      {{"optimizer.betas", "two numbers", "", "from 0 to below 1", "AdamW's betas", true}, set_betas, get_betas},
      // The optimizer computes in f32, where anything less may be 0, and 0 / 0 is NaN.
      number<double>("optimizer.eps", of_optimizer(&Optimizer::eps), std::numeric_limits<float>::min(), huge,
                     ">= 1.2e-38, to differ from 0 in f32", "AdamW's epsilon"),
      from_zero("optimizer.weight_decay", of_optimizer(&Optimizer::weight_decay), "decoupled weight decay"),
      from_zero("optimizer.clip", of_optimizer(&Optimizer::clip), "gradient clipping by norm; 0: off"),
      word("schedule.kind", of_schedule(&Schedule::kind), {"constant", "cosine", "linear"},
           "learning rate after the warmup; schedule: KIND is short for it"),
      whole("schedule.warmup", of_schedule(&Schedule::warmup), 0, "steps from learning rate 0 to lr"),
      from_zero("schedule.min_lr", of_schedule(&Schedule::min_lr), "learning rate at the end of cosine and linear"),
      word("dtype", in(&Recipe::dtype), {"auto", "f32", "bf16"},
           "to compute in; frozen weights stay as stored, trainable parameters are f32"),
      resume_safe(checkpointing_field()),
      resume_safe(word("shard", in(&Recipe::shard), {"none", "base"},
                       "base: frozen weights and optimizer state are sharded over the ranks (FSDP-style)")),
      resume_safe(whole("sequence_parallel", in(&Recipe::sequence_parallel), 1, "ranks per sequence (Ulysses)")),
      resume_safe(whole("save_every", in(&Recipe::save_every), 0, "steps between checkpoints; 0: at the end")),
      resume_safe(whole("keep", in(&Recipe::keep), 1, "how many checkpoints to keep, the newest")),
      share("held_out", in(&Recipe::held_out), "share of the data held out for evaluation"),
      resume_safe(whole("eval_every", in(&Recipe::eval_every), 0, "steps between evaluations; 0: never")),
      resume_safe(
          whole("eval_windows", in(&Recipe::eval_windows), 0, "sequences per evaluation; 0: all that are held out")),
      resume_safe(whole("log_every", in(&Recipe::log_every), 1, "steps between lines of metrics.jsonl")),
      number<std::uint64_t>("seed", in(&Recipe::seed), 0, std::numeric_limits<std::int64_t>::max(), ">= 0",
                            "of all random numbers"),
  };
  all.insert(all.end(), std::begin(rest), std::end(rest));

  Recipe plain;
  random_model(plain);
  for (Field& field : all) {
    if (field.key.fallback.empty() && !field.needed) field.key.fallback = field.get(plain);
  }
  return all;
}

}  // namespace

const std::vector<Field>& fields() {
  static const std::vector<Field> all = make_fields();
  return all;
}

const Field* find_field(std::string_view name) {
  for (const Field& field : fields()) {
    if (field.key.name == name) return &field;
  }
  return nullptr;
}

std::string section_of(std::string_view name) {
  const std::size_t dot = name.find('.');
  return std::string(name.substr(0, dot == std::string_view::npos ? 0 : dot));
}

std::string_view last_of(std::string_view name) { return name.substr(name.rfind('.') + 1); }

bool is_section(std::string_view name) {
  if (name.empty()) return false;
  return std::any_of(fields().begin(), fields().end(),
                     [&](const Field& field) { return section_of(field.key.name) == name; });
}

std::vector<std::string_view> names_in(std::string_view section) {
  std::vector<std::string_view> names;
  for (const Field& field : fields()) {
    const std::string_view name = field.key.name;
    const std::string_view found = section.empty() ? name.substr(0, name.find('.')) : last_of(name);
    if ((section.empty() || section_of(name) == section) && (names.empty() || names.back() != found))
      names.push_back(found);
  }
  return names;
}

std::string shortened(const std::string& text) {
  constexpr std::size_t most = 80;
  return text.size() <= most ? text : fmt::format("{}…", std::string_view(text).substr(0, most));
}

std::string shown(const YamlNode& node) {
  switch (node.kind) {
    case Kind::null:
      return "empty";
    case Kind::list:
      return "a list";
    case Kind::map:
      return "a map";
    case Kind::scalar:
      break;
  }
  return fmt::format("\"{}\"", shortened(node.text));
}

std::string must_be(std::string_view name, const std::string& what, const YamlNode& node) {
  return fmt::format("{} must be {}, but is {}.", name, what, shown(node));
}

std::string hint(std::string_view word, const std::vector<std::string_view>& known) {
  const std::string meant = nearest(word, known);
  return meant.empty() ? "" : fmt::format(" (did you mean {}?)", meant);
}

std::string bare(const Error& error) {
  const std::string_view text = error.what();
  const std::size_t end = text.find("] ");
  return std::string(end == std::string_view::npos ? text : text.substr(end + 2));
}

bool takes(std::string_view method, std::string_view key) {
  const std::vector<std::string_view>& keys = find_method(method).keys;
  return std::find(keys.begin(), keys.end(), key) != keys.end();
}

std::string recipe_name(std::string_view setting) {
  // Settings that stand outside of `adapter`.
  for (const std::string_view name :
       {"positions.scaling", "positions.factor", "positions.theta", "train_also", "untie"}) {
    if (last_of(name) == setting) return std::string(name);
  }
  return "adapter." + std::string(setting);
}

RandomModel& random_model(Recipe& recipe) { return recipe.init ? *recipe.init : recipe.init.emplace(); }

}  // namespace tapetune::schema
