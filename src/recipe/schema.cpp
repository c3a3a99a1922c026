#include "recipe/schema.h"

#include <algorithm>
#include <limits>

#include "core/nearest.h"
#include "data/utf8.h"
#include "recipe/fields.h"

namespace tapetune::schema {

namespace {

using Kind = YamlNode::Kind;

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
          return report(entry,
                        fmt::format("data has no key \"{}\"; an entry takes path and weight{}.", shortened(entry.key),
                                    did_you_mean(entry.key, std::vector<std::string_view>{"path", "weight"})));
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
  all.push_back(preset_field());
  for (const MethodKey& key : method_keys()) all.push_back(method_field(key));

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

RandomModel& random_model(Recipe& recipe) { return recipe.init ? *recipe.init : recipe.init.emplace(); }

}  // namespace tapetune::schema
