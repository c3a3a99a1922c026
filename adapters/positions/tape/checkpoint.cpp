#include "adapters/positions/tape/checkpoint.h"

#include <charconv>

#include "adapters/positions/own_architecture.h"
#include "adapters/positions/tape/tape.h"
#include "adapters/positions/tape/tape_files.h"
#include "checkpoint/carry.h"
#include "core/error.h"

namespace tapetune {

namespace {

constexpr std::string_view layer_prefix = "model.layers.";
constexpr std::string_view tensors[] = {"pe.up_proj.weight", "pe.x_proj.weight", "pe.down_proj.weight",
                                        "post_attention_linear.weight"};

// What config.json says of the encoding: under "position", as the lab's folders and merges have it, or under "tape",
// as earlier merges. An option that is not read would be one that is not obeyed.
struct Stated {
  std::string mix;
  std::optional<Json> inner;  // I
};

Stated stated_options(const Json& config, const std::string& where) {
  const Json nothing = Json::object();
  const auto object = [&](const char* key) -> const Json& {
    const auto found = config.find(key);
    return found != config.end() && found->is_object() ? *found : nothing;
  };
  const Json &position = object("position"), &earlier = object("tape");
  for (const auto& [key, value] : position.items()) {
    if (key != "type" && key != "mix" && key != "I") {
      fail("tape", "{}: position.{} is not supported; tape takes mix and I.", where, key);
    }
  }
  const auto text = [&](const Json& from, const char* key) {
    if (!from.contains("mix")) return std::string();
    if (!from["mix"].is_string()) fail("tape", "{}: {}.mix must be full or per-head.", where, key);
    return from["mix"].get<std::string>();
  };
  Stated stated{text(position, "position"), std::nullopt};
  if (stated.mix.empty()) stated.mix = text(earlier, "tape");
  // The default of a folder that names its encoding is the paper's; the authors' code, which names none, has the other.
  if (stated.mix.empty()) stated.mix = position.empty() ? "per-head" : "full";
  if (position.contains("I")) stated.inner = position["I"];
  return stated;
}

}  // namespace

// By exact names: the ablations store others, which mean another computation.
bool is_tape_tensor(const ModelConfig& config, std::string_view name) {
  if (!name.starts_with(layer_prefix)) return false;
  name.remove_prefix(layer_prefix.size());
  std::int64_t layer = 0;
  const auto [rest, error] = std::from_chars(name.data(), name.data() + name.size(), layer);
  name.remove_prefix(static_cast<std::size_t>(rest - name.data()));
  if (error != std::errc() || layer < 0 || layer >= config.layers || !name.starts_with('.')) return false;
  return std::ranges::find(tensors, name.substr(1)) != std::end(tensors);
}

Settings stored_tape_settings(const Checkpoint& checkpoint) {
  const std::string where = (checkpoint.path() / "config.json").string();
  const Json config = parse_json(checkpoint.config().json, "tape", where);
  const Stated stated = stated_options(config, where);
  const std::int64_t heads = checkpoint.config().heads;
  const auto up = checkpoint.stored().find("model.layers.0.pe.up_proj.weight");
  if (up == checkpoint.stored().end()) {
    fail("tape",
         "{}: tensor model.layers.0.pe.up_proj.weight is missing; the shards are incomplete or of another model.",
         checkpoint.path().string());
  }
  if (up->second.entry.shape.empty() || up->second.entry.shape[0] % heads != 0) {
    fail("tape", "{}: model.layers.0.pe.up_proj.weight must have a multiple of {} rows (the number of heads).",
         checkpoint.path().string(), heads);
  }
  const std::int64_t inner = up->second.entry.shape[0];
  if (stated.inner && *stated.inner != inner) {
    fail("tape",
         "{}: position.I is {}, but model.layers.0.pe.up_proj.weight has {} rows; they are of different models.", where,
         to_text(*stated.inner), inner);
  }
  const PositionComponent tape = tape_component();
  Settings settings = default_settings(tape.name, tape.keys);
  for (const Key& key : tape.keys) {
    if (key.name == "mix") settings.values["mix"] = parse_value(key, stated.mix);
  }
  settings.values["width"] = inner / heads;
  return settings;
}

void export_tape(const Settings& settings, const ModelConfig& config, const std::filesystem::path& tokenizer,
                 Files& files) {
  for (const TapeFile& file : tape_files()) files.emplace(file.name, file.text);
  Json json = parse_json(files.at("config.json"), "merge", "config.json");
  json["model_type"] = "tape_llama";
  json["architectures"] = Json::array({"TapeForCausalLM"});
  json["auto_map"] = {{"AutoConfig", "configuration_tape.TapeConfig"},
                      {"AutoModel", "modeling_tape.TapeModel"},
                      {"AutoModelForCausalLM", "modeling_tape.TapeForCausalLM"}};
  // Otherwise transformers looks for the tokenizer class of the model type, and knows none for this one.
  if (!tokenizer_settings(tokenizer).contains("tokenizer_class")) json["tokenizer_class"] = "PreTrainedTokenizerFast";
  const std::string mix = settings.word("mix");
  const std::int64_t width = settings.whole("width");
  json["tape"] = {{"mix", mix}, {"width", width}};
  write_position(json, config, {{"type", "tape"}, {"mix", mix}, {"I", width * config.heads}});
  files["config.json"] = to_text(json, 2) + "\n";
}

}  // namespace tapetune
