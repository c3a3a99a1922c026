#include "export/card.h"

#include "adapters/build_model.h"
#include "adapters/component.h"
#include "adapters/peft_config.h"
#include "checkpoint/carry.h"
#include "core/digits.h"
#include "core/file.h"
#include "core/json.h"
#include "core/markdown.h"
#include "core/shell.h"

namespace tapetune {

namespace fs = std::filesystem;

namespace {

std::string name_of(const fs::path& folder) {
  const fs::path plain = (fs::absolute(folder) / "").lexically_normal().parent_path();
  return plain.filename().string();
}

std::string settings_of(const MethodOptions& method) {
  std::string text = method.name();
  for (const auto& [name, value] : shown_settings(method)) text += fmt::format(" {}={}", name, value);
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
  return fmt::format("---\nlibrary_name: {}\ntags:\n- tapetune\n- {}\n---\n", library, one_line(origin.method.name()));
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
  const PositionComponent& encoding = position_component(origin.method, config);
  const bool plain = encoding.export_files == nullptr, code = !encoding.exported.empty();
  const std::string name = name_of(folder);
  const std::string_view trust = code ? ", trust_remote_code=True" : "";
  std::string text = front(origin, "transformers");
  text += fmt::format("\n# {}\n\n{}\n\n{}", markdown_text(name),
                      !encoding.card.empty() ? encoding.card
                      : plain                ? "A language model in Hugging Face format, merged by tapetune."
                                             : "A language model whose positions only tapetune computes.",
                      facts(origin, config));
  text += "\n## Use\n";
  if (plain || code) {
    text += fmt::format("\n```python\n{}", imports);
    text +=
        fmt::format("model = AutoModelForCausalLM.from_pretrained({}, dtype=\"auto\"{})\n", python_text(name), trust);
    text += fmt::format("tokenizer = AutoTokenizer.from_pretrained({}{})\n```\n", python_text(name), trust);
  }
  text += fmt::format("\n    tapetune generate {} --prompt 'Once upon a time'\n", shell_word(one_line(name)));
  // vLLM multiplies max_position_embeddings by a linear factor, and would offer a context that was not trained.
  if (plain)
    text += fmt::format("    vllm serve {} --max-model-len {}\n", shell_word(one_line(name)), config.longest_context());
  return text;
}

std::string adapter_card(const Origin& origin, const ModelConfig& config, const fs::path& folder) {
  const bool peft = peft_loads(origin.method);
  const std::string name = name_of(folder);
  std::string text = front(origin, peft ? "peft" : "tapetune");
  text +=
      fmt::format("\n# {}\n\nAn adapter in PEFT format, trained by tapetune.{}\n\n{}\n## Use\n\n", markdown_text(name),
                  peft ? "" : " Only tapetune loads it; merge it to use it elsewhere.", facts(origin, config));
  if (peft) {
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

}  // namespace tapetune
