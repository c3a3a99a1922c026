#include "merge/card.h"

#include "core/json.h"
#include "merge/tape_files.h"

namespace tapetune {

namespace fs = std::filesystem;

namespace {

std::string name_of(const fs::path& folder) {
  const fs::path plain = (fs::absolute(folder) / "").lexically_normal().parent_path();
  return plain.filename().string();
}

std::string settings_of(const MethodOptions& method) {
  std::string text = method.method;
  const Json json = method_json(method);
  for (const auto& [key, value] : json.items()) {
    if (key == "method" || value.is_null()) continue;
    std::string words;
    for (const Json& word : value.is_array() ? value : Json::array({value})) {
      words +=
          fmt::format("{}{}", words.empty() ? "" : ",", word.is_string() ? word.get<std::string>() : to_text(word));
    }
    if (!words.empty()) text += fmt::format(" {}={}", key, words);
  }
  return text;
}

std::string rotary_text(const RopeConfig& rope) {
  std::string text = fmt::format("{}, theta {:g}", rope_type_name(rope.type), rope.theta);
  if (rope.type != RopeType::standard) text += fmt::format(", factor {:g}", rope.factor);
  return text;
}

std::string front(const Origin& origin, std::string_view library) {
  return fmt::format("---\nlibrary_name: {}\ntags:\n- tapetune\n- {}\n---\n", library, origin.method.method);
}

std::string facts(const Origin& origin, const ModelConfig& config) {
  std::string text = "| | |\n|---|---|\n";
  const auto row = [&](std::string_view name, const std::string& value) {
    text += fmt::format("| {} | {} |\n", name, value);
  };
  row("base model", origin.base.empty() ? "none: trained from random weights" : fmt::format("`{}`", origin.base));
  if (!origin.base_hash.empty()) row("its weights", fmt::format("`{}`", origin.base_hash));
  if (!origin.trained_hash.empty() && origin.trained_hash != origin.base_hash) {
    row("trained on other weights", fmt::format("`{}`", origin.trained_hash));
  }
  row("method", fmt::format("`{}`", settings_of(origin.method)));
  if (origin.step) row("step", fmt::format("{}, of a run that was not finished", *origin.step));
  row("context", origin.base_context == config.longest_context()
                     ? fmt::format("{}", config.longest_context())
                     : fmt::format("{} (the base model's: {})", config.longest_context(), origin.base_context));
  row("rotary settings", rotary_text(config.rope));
  row("tapetune", origin.version);
  return text + "\n`tapetune_provenance.json` has the whole recipe.\n";
}

constexpr std::string_view python_start = "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n";

}  // namespace

std::string provenance(const Origin& origin, std::string_view what) {
  Json json;
  json["what"] = what;
  json["tapetune"] = origin.version;
  json["base"] = origin.base.empty() ? Json() : Json{{"path", origin.base}, {"hash", origin.base_hash}};
  if (!origin.trained_hash.empty()) json["trained_on"] = origin.trained_hash;
  json["method"] = method_json(origin.method);
  if (origin.step) json["unfinished_at_step"] = *origin.step;
  json["recipe"] = origin.recipe.empty() ? Json() : Json(origin.recipe);
  return to_text(json, 2, Json::error_handler_t::replace) + "\n";
}

std::string model_card(const Origin& origin, const ModelConfig& config, const fs::path& folder) {
  const bool tape = origin.method.method == "tape";
  const std::string name = name_of(folder);
  std::string text = front(origin, "transformers");
  text += fmt::format("\n# {}\n\n{}\n\n", name,
                      tape ? "A Llama with TAPE's contextual positions, merged by tapetune. `modeling_tape.py` beside "
                             "the weights is its code for transformers."
                           : "A language model of Hugging Face's layout, merged by tapetune.");
  text += facts(origin, config) + "\n## Use\n\n" + std::string(python_start);
  text += fmt::format("model = AutoModelForCausalLM.from_pretrained(\"{}\", dtype=\"auto\"{})\n", name,
                      tape ? ", trust_remote_code=True" : "");
  text += fmt::format("tokenizer = AutoTokenizer.from_pretrained(\"{}\")\n```\n", name);
  text += fmt::format("\n    tapetune generate {} --prompt 'Once upon a time'\n", name);
  if (!tape) text += fmt::format("    vllm serve {}\n", name);
  return text;
}

std::string adapter_card(const Origin& origin, const ModelConfig& config, const fs::path& folder) {
  const bool tape = origin.method.method == "tape";
  const std::string name = name_of(folder);
  std::string text = front(origin, tape ? "tapetune" : "peft");
  text += fmt::format("\n# {}\n\nAn adapter in PEFT's layout, made by tapetune.\n\n", name) + facts(origin, config);
  text += "\n## Use\n\n";
  if (!tape) {
    text += std::string(python_start) + "from peft import PeftModel\n";
    text += fmt::format("model = AutoModelForCausalLM.from_pretrained(\"{}\", dtype=\"auto\")\n", origin.base);
    text += fmt::format("model = PeftModel.from_pretrained(model, \"{}\")\n```\n\n", name);
    text +=
        "The rotary settings above are not part of an adapter: where they differ from the base model's, give them "
        "to the base model's config, or merge.\n";
  }
  return text + fmt::format("\n    tapetune generate {} --adapter {} --prompt 'Once upon a time'\n",
                            origin.base.empty() ? "BASE" : origin.base, name);
}

void add_tape_files(const ModelConfig& config, const MethodOptions& method, std::map<std::string, std::string>& files) {
  for (const TapeFile& file : tape_files()) files.emplace(file.name, file.text);
  Json json = parse_json(files.at("config.json"), "merge", "config.json");
  json["model_type"] = "tape_llama";
  json["architectures"] = Json::array({"TapeForCausalLM"});
  json["auto_map"] = {{"AutoConfig", "configuration_tape.TapeConfig"},
                      {"AutoModel", "modeling_tape.TapeModel"},
                      {"AutoModelForCausalLM", "modeling_tape.TapeForCausalLM"}};
  json["tape"] = {{"mix", method.mix == Mix::full ? "full" : "per-head"}, {"width", method.width}};
  // One class stands for all architectures, whose defaults differ: nothing is left to them.
  json["head_dim"] = config.head_dim;
  json["bos_token_id"] = config.bos ? Json(*config.bos) : Json();
  json["eos_token_id"] = config.eos.empty() ? Json() : config.eos.size() == 1 ? Json(config.eos[0]) : Json(config.eos);
  json["attention_bias"] = config.qkv_bias;
  json["attention_output_bias"] = config.output_bias;
  json["mlp_bias"] = config.mlp_bias;
  for (const char* key : {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}) json.erase(key);
  files["config.json"] = to_text(json, 2) + "\n";
}

}  // namespace tapetune
