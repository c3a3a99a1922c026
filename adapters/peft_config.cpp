#include "adapters/peft_config.h"

#include <cctype>

#include "adapters/component.h"
#include "adapters/peft.h"
#include "core/error.h"

namespace tapetune {

namespace {

std::string upper(std::string_view text) {
  std::string all(text);
  for (char& c : all) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return all;
}

// Positions that a recipe chose: PEFT has none of them.
bool has_own_positions(const MethodOptions& options) {
  return options.positions.type != base_positions && options.positions.type != default_positions;
}

// The type of an adapter that PEFT cannot load: it would take the parts that it knows and silently skip the rest, so
// that it must not know the type.
std::string foreign_type(const MethodOptions& options) {
  if (has_own_positions(options)) return upper(options.positions.type);
  if (options.train_also.all) return "FULL";
  return options.adapter.type != "none" ? upper(options.adapter.type) : "BASE";
}

}  // namespace

bool stays_tied(const AdaptedModel& adapted) {
  return adapted.model.config().tied_embeddings && adapted.model.weights().embedding.requires_grad();
}

bool peft_loads(const MethodOptions& options) {
  return adapter_components().find(options.adapter.type).to_peft != nullptr && !has_own_positions(options) &&
         !options.train_also.all;
}

Json peft_config(const AdaptedModel& adapted, const std::filesystem::path& base) {
  const MethodOptions& options = adapted.options;
  const AdapterComponent& adapter = adapter_components().find(options.adapter.type);
  Json config;
  config["base_model_name_or_path"] = base.string();
  config["task_type"] = "CAUSAL_LM";
  config["inference_mode"] = true;
  if (!peft_loads(options)) {
    config["peft_type"] = foreign_type(options);
    return config;
  }
  config["peft_type"] = adapter.peft_type;
  config.update(adapter.to_peft(options.adapter));
  Json saved = Json::array();
  const bool tied = stays_tied(adapted);
  if (options.train_also.embeddings || tied) saved.push_back("embed_tokens");
  // Where PEFT cannot tie them, it loads both of the equal matrices.
  if (tied ? !adapter.peft_ties : options.train_also.head) saved.push_back("lm_head");
  if (options.train_also.norms) {
    // PEFT goes by the last part of a module's name.
    std::vector<std::string> norms;
    for (const TensorSpec& tensor : tensor_specs(adapted.model.config())) {
      if (tensor.kind != TensorKind::norm) continue;
      const std::string module = tensor.name.substr(0, tensor.name.rfind('.'));
      const std::string last = module.substr(module.rfind('.') + 1);
      if (std::ranges::find(norms, last) == norms.end()) norms.push_back(last);
    }
    for (const std::string& norm : norms) saved.push_back(norm);
  }
  config["modules_to_save"] = saved.empty() ? Json() : saved;
  if (adapter.peft_ties) config["ensure_weight_tying"] = tied;
  return config;
}

namespace {

// The component of PEFT's peft_type; fails where there is none.
const AdapterComponent& peft_component(const Json& config, const std::string& where) {
  if (!config.is_object() || !config.contains("peft_type") || !config["peft_type"].is_string()) {
    fail("adapter", "{}: names no peft_type; save the adapter again with PEFT.", where);
  }
  const auto type = config["peft_type"].get<std::string>();
  std::vector<std::string> own{"FULL", "BASE"};
  std::vector<std::string_view> known;
  for (const AdapterComponent& adapter : adapter_components().all()) {
    if (adapter.to_peft == nullptr) own.push_back(upper(adapter.name));
    if (adapter.from_peft == nullptr) continue;
    if (adapter.peft_type == type) return adapter;
    known.push_back(adapter.peft_type);
  }
  for (const PositionComponent& encoding : position_components().all()) own.push_back(upper(encoding.name));
  if (std::ranges::find(own, type) != own.end()) {
    fail("adapter", "{}: peft_type {} is tapetune's own and needs tapetune.json beside it; copy the whole folder.",
         where, type);
  }
  constexpr std::string_view never_merged[] = {"PROMPT_TUNING",
                                               "MULTITASK_PROMPT_TUNING",
                                               "P_TUNING",
                                               "PREFIX_TUNING",
                                               "CPT",
                                               "CARTRIDGE",
                                               "POLY",
                                               "XLORA",
                                               "SHADOW",
                                               "LILY",
                                               "ADAPTION_PROMPT"};
  const bool mergeable = std::ranges::find(never_merged, type) == std::end(never_merged);
  fail("adapter", "{}: peft_type {} is not supported, only {}; {}.", where, type, fmt::join(known, ", "),
       mergeable ? merge_in_peft : not_mergeable);
}

// What PEFT trained whole: train_also and untie. Of the adapter's own tensors the component knows.
void read_saved_modules(MethodOptions& options, const Json& config, const StoredTensors& stored,
                        const ModelConfig& model, const std::string& where) {
  const std::string embedding = name_on_disk("model.embed_tokens.weight"), output = name_on_disk("lm_head.weight");
  std::int64_t norms = 0, all_norms = 0;
  for (const TensorSpec& tensor : tensor_specs(model)) {
    const bool saved = stored.contains(name_on_disk(tensor.name)), norm = tensor.kind == TensorKind::norm;
    all_norms += norm ? 1 : 0;
    norms += norm && saved ? 1 : 0;
    if (!saved || norm || tensor.kind == TensorKind::embedding || tensor.kind == TensorKind::head) continue;
    fail("adapter", "{}: modules_to_save has {}, but only embed_tokens, lm_head and the norms are supported; {}.",
         where, tensor.name, merge_in_peft);
  }
  if (norms > 0 && norms != all_norms) {
    fail("adapter", "{}: modules_to_save has {} of the model's {} norms, but only all of them are supported; {}.",
         where, norms, all_norms, merge_in_peft);
  }
  const bool tying = config.contains("ensure_weight_tying") && config["ensure_weight_tying"] == true;
  const bool tied = model.tied_embeddings, whole = stored.contains(embedding), head = stored.contains(output);
  options.train_also.embeddings = whole;
  options.train_also.norms = norms > 0;
  options.train_also.head = head && !(tied && tying);
  // PEFT separates a head from embeddings that it trains, unless told to keep them tied.
  options.untie = tied && !tying && (whole || head);
}

}  // namespace

MethodOptions options_from_peft(const Json& config, const StoredTensors& stored, const ModelConfig& model,
                                const std::string& where) {
  const AdapterComponent& adapter = peft_component(config, where);
  std::vector<std::string> words{fmt::format("adapter.type={}", adapter.name)};
  for (const std::string& word : adapter.from_peft(config, stored, model, where)) words.push_back("adapter." + word);
  const bool named = std::ranges::any_of(presets(), [&](const Preset& preset) { return preset.name == adapter.name; });
  MethodOptions options = parse_method(named ? adapter.name : "none", words);
  read_saved_modules(options, config, stored, model, where);
  return options;
}

}  // namespace tapetune
