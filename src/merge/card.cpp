#include "merge/card.h"

#include "core/digits.h"
#include "core/file.h"
#include "core/json.h"
#include "core/markdown.h"
#include "core/shell.h"
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

// A Python string; JSON's escapes are Python's.
std::string python_text(const std::string& text) { return to_text(Json(text)); }

std::string rope_text(const RopeConfig& rope) {
  std::string text = fmt::format("{}, theta {:g}", rope_type_name(rope.type), rope.theta);
  if (rope.type != RopeType::standard) text += fmt::format(", factor {:g}", rope.factor);
  return text;
}

std::string front(const Origin& origin, std::string_view library) {
  return fmt::format("---\nlibrary_name: {}\ntags:\n- tapetune\n- {}\n---\n", library, one_line(origin.method.method));
}

std::string facts(const Origin& origin, const ModelConfig& config) {
  std::string text = "| | |\n|---|---|\n";
  const auto row = [&](std::string_view name, const std::string& value) {
    text += fmt::format("| {} | {} |\n", name, value);
  };
  row("base model", origin.base.empty() ? "none: trained from random weights" : markdown_code(origin.base));
  if (!origin.base_hash.empty()) row("hash of its weights", markdown_code(origin.base_hash));
  if (!origin.trained_hash.empty() && origin.trained_hash != origin.base_hash) {
    row("trained on other weights", markdown_code(origin.trained_hash));
  }
  row("method", markdown_code(settings_of(origin.method)));
  if (origin.steps > 0) {
    row("training", fmt::format("{} of {} x {} tokens", counted(origin.steps, "step"), origin.batch, origin.context));
  }
  if (origin.step) {
    row("checkpoint",
        fmt::format("step {} of {}{}", *origin.step, origin.steps, origin.finished ? "" : ", of an unfinished run"));
  }
  row("context", origin.base_context == config.longest_context()
                     ? fmt::format("{}", config.longest_context())
                     : fmt::format("{} (base model: {})", config.longest_context(), origin.base_context));
  row("RoPE", rope_text(config.rope));
  row("tapetune", markdown_text(origin.version));
  text += "\n`tapetune_provenance.json` has the full recipe.\n";
  return text;
}

// tokenizer_config.json of a folder; empty where it has none.
Json tokenizer_settings(const fs::path& folder) {
  const fs::path file = folder / "tokenizer_config.json";
  std::error_code status;
  if (folder.empty() || !fs::exists(file, status)) return Json::object();
  Json json = parse_json(read_text(file), "merge", file.string());
  return json.is_object() ? json : Json::object();
}

constexpr std::string_view imports = "from transformers import AutoModelForCausalLM, AutoTokenizer\n";

// Python that gives the base model the adapter's positions, which PEFT does not store.
std::string rope_lines(const Origin& origin, const ModelConfig& config) {
  std::string rope = rope_scaling_text(config.rope);
  if (const std::size_t flag = rope.find("false"); flag != std::string::npos) rope.replace(flag, 5, "False");
  const std::string theta = to_text(Json(config.rope.theta));
  return fmt::format(
      "config = AutoConfig.from_pretrained({})\n"
      "rope = {}\n"
      "if hasattr(config, \"rope_parameters\"):  # transformers 5\n"
      "    config.rope_parameters = {{**rope, \"rope_theta\": {}}}\n"
      "else:\n"
      "    config.rope_theta, config.rope_scaling = {}, rope\n"
      "config.max_position_embeddings = {}\n",
      python_text(origin.base), rope, theta, theta, config.context);
}

}  // namespace

std::string provenance(const Origin& origin, std::string_view what) {
  Json json;
  json["what"] = what;
  json["tapetune"] = origin.version;
  json["base"] = origin.base.empty() ? Json() : Json{{"path", origin.base}, {"hash", origin.base_hash}};
  if (!origin.trained_hash.empty()) json["trained_on"] = origin.trained_hash;
  json["method"] = method_json(origin.method);
  if (origin.step) json[origin.finished ? "step" : "unfinished_at_step"] = *origin.step;
  json["recipe"] = origin.recipe.empty() ? Json() : Json(origin.recipe);
  return to_text(json, 2) + "\n";
}

std::string model_card(const Origin& origin, const ModelConfig& config, const fs::path& folder) {
  const bool tape = origin.method.method == "tape";
  const std::string name = name_of(folder);
  const std::string_view trust = tape ? ", trust_remote_code=True" : "";
  std::string text = front(origin, "transformers");
  text += fmt::format("\n# {}\n\n{}\n\n{}", markdown_text(name),
                      tape ? "A Llama with TAPE's contextual positions, merged by tapetune. `modeling_tape.py` beside "
                             "the weights lets transformers run it."
                           : "A language model in Hugging Face format, merged by tapetune.",
                      facts(origin, config));
  text += fmt::format("\n## Use\n\n```python\n{}", imports);
  text += fmt::format("model = AutoModelForCausalLM.from_pretrained({}, dtype=\"auto\"{})\n", python_text(name), trust);
  text += fmt::format("tokenizer = AutoTokenizer.from_pretrained({}{})\n```\n", python_text(name), trust);
  text += fmt::format("\n    tapetune generate {} --prompt 'Once upon a time'\n", shell_word(one_line(name)));
  // vLLM multiplies max_position_embeddings by a linear factor, and would offer a context that was not trained.
  if (!tape)
    text += fmt::format("    vllm serve {} --max-model-len {}\n", shell_word(one_line(name)), config.longest_context());
  return text;
}

std::string adapter_card(const Origin& origin, const ModelConfig& config, const fs::path& folder) {
  const bool tape = origin.method.method == "tape";
  const std::string name = name_of(folder);
  std::string text = front(origin, tape ? "tapetune" : "peft");
  text +=
      fmt::format("\n# {}\n\nAn adapter in PEFT format, trained by tapetune.{}\n\n{}\n## Use\n\n", markdown_text(name),
                  tape ? " Only tapetune loads it; merge it to use it elsewhere." : "", facts(origin, config));
  if (!tape) {
    const bool scaled = !(config.rope == origin.base_rope);
    text += fmt::format("```python\nfrom transformers import {}AutoModelForCausalLM\nfrom peft import PeftModel\n",
                        scaled ? "AutoConfig, " : "");
    if (scaled) text += rope_lines(origin, config);
    text += fmt::format("model = AutoModelForCausalLM.from_pretrained({}, {}dtype=\"auto\")\n",
                        python_text(origin.base), scaled ? "config=config, " : "");
    text += fmt::format("model = PeftModel.from_pretrained(model, {})\n```\n\n", python_text(name));
    if (scaled) {
      text +=
          "An adapter does not store RoPE settings: without the lines about `config`, the base model's positions would "
          "be used, and the results would be wrong.\n";
    }
  }
  text += fmt::format("\n    tapetune generate {} --adapter {} --prompt 'Once upon a time'\n",
                      origin.base.empty() ? "BASE" : shell_word(one_line(origin.base)), shell_word(one_line(name)));
  return text;
}

void complete_tokenizer(const ModelConfig& config, const fs::path& tokenizer,
                        std::map<std::string, std::string>& files) {
  constexpr const char* key = "model_max_length";
  std::error_code status;
  if (!tokenizer.empty() && fs::exists(tokenizer / "tokenizer.json", status) &&
      !fs::exists(tokenizer / "tokenizer_config.json", status)) {
    // transformers 4 would choose a class by the model's type, which adds tokens of its own.
    const Json plain{{"tokenizer_class", "PreTrainedTokenizerFast"},
                     {"model_input_names", {"input_ids", "attention_mask"}}};
    files["tokenizer_config.json"] = to_text(plain, 2) + "\n";
    return;
  }
  Json json = tokenizer_settings(tokenizer);
  if (!json.contains(key) || !json[key].is_number()) return;
  if (json[key].get<double>() >= static_cast<double>(config.longest_context())) return;
  json[key] = config.longest_context();
  files["tokenizer_config.json"] = to_text(json, 2) + "\n";
}

void add_tape_files(const ModelConfig& config, const MethodOptions& method, const fs::path& tokenizer,
                    std::map<std::string, std::string>& files) {
  for (const TapeFile& file : tape_files()) files.emplace(file.name, file.text);
  Json json = parse_json(files.at("config.json"), "merge", "config.json");
  json["model_type"] = "tape_llama";
  json["architectures"] = Json::array({"TapeForCausalLM"});
  json["auto_map"] = {{"AutoConfig", "configuration_tape.TapeConfig"},
                      {"AutoModel", "modeling_tape.TapeModel"},
                      {"AutoModelForCausalLM", "modeling_tape.TapeForCausalLM"}};
  // Otherwise transformers looks for the tokenizer class of the model type, and knows none for this one.
  if (!tokenizer_settings(tokenizer).contains("tokenizer_class")) json["tokenizer_class"] = "PreTrainedTokenizerFast";
  const char* mix = method.mix == Mix::full ? "full" : "per-head";
  json["tape"] = {{"mix", mix}, {"width", method.width}};
  json["position"] = {{"type", "tape"}, {"mix", mix}, {"I", method.width * config.heads}};
  // One class serves all architectures, whose defaults differ, so every setting is written.
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
