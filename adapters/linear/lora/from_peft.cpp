#include <charconv>
#include <set>

#include "adapters/linear/lora/lora.h"
#include "adapters/peft.h"
#include "adapters/peft_config.h"
#include "core/error.h"
#include "core/log.h"

namespace tapetune {

namespace {

bool is_unset(const Json& value) {
  return value.is_null() || value == false || ((value.is_object() || value.is_array()) && value.empty());
}

bool contains_text(std::span<const std::string_view> list, std::string_view text) {
  return std::find(list.begin(), list.end(), text) != list.end();
}

// What changes the result and is not done here must not be ignored.
void refuse_settings(const Json& config, const std::string& where) {
  const auto refuse = [&](const char* key, const char* remedy) {
    fail("adapter", "{}: {} = {} is not supported; {}.", where, key, to_text(config[key]), remedy);
  };
  for (const char* key : {"rank_pattern", "alpha_pattern", "fan_in_fan_out", "use_bdlora", "trainable_token_indices",
                          "target_parameters", "monteclora_config", "kasa_config"}) {
    if (config.contains(key) && !is_unset(config[key])) refuse(key, merge_in_peft);
  }
  for (const char* key : {"alora_invocation_tokens", "arrow_config", "layer_replication", "use_qalora"}) {
    if (config.contains(key) && !is_unset(config[key])) refuse(key, not_mergeable);
  }
  if (config.contains("lora_bias") && !is_unset(config["lora_bias"])) {
    refuse("lora_bias", "PEFT merges it (merge_and_unload) only where the projections have a bias; train without it");
  }
  if (config.contains("bias") && !config["bias"].is_null() && config["bias"] != "none") refuse("bias", merge_in_peft);
  // These starts change the frozen weights too, each time that PEFT loads them.
  const auto start = config.find("init_lora_weights");
  if (start == config.end() || !start->is_string()) return;
  for (const char* kind : {"pissa", "olora", "corda", "loftq", "lora_ga"}) {
    if (start->get_ref<const std::string&>().starts_with(kind)) refuse("init_lora_weights", merge_in_peft);
  }
}

// A later PEFT may have settings that are not known here; PEFT itself warns of such and ignores them.
void warn_of_unknown(const Json& config, const std::string& where) {
  constexpr std::string_view known[] = {"alora_invocation_tokens",
                                        "alpha_pattern",
                                        "arrow_config",
                                        "auto_mapping",
                                        "base_model_name_or_path",
                                        "bias",
                                        "corda_config",
                                        "ensure_weight_tying",
                                        "eva_config",
                                        "exclude_modules",
                                        "fan_in_fan_out",
                                        "inference_mode",
                                        "init_lora_weights",
                                        "kasa_config",

                                        "layer_replication",
                                        "layers_pattern",
                                        "layers_to_transform",
                                        "loftq_config",
                                        "lora_alpha",
                                        "lora_bias",
                                        "lora_dropout",
                                        "lora_ga_config",
                                        "megatron_config",
                                        "megatron_core",
                                        "modules_to_save",
                                        "monteclora_config",
                                        "peft_type",
                                        "peft_version",
                                        "qalora_group_size",
                                        "r",
                                        "rank_pattern",
                                        "revision",
                                        "runtime_config",
                                        "target_modules",
                                        "target_parameters",
                                        "task_type",
                                        "trainable_token_indices",
                                        "use_bdlora",
                                        "use_dora",
                                        "use_qalora",
                                        "use_rslora",
                                        "velora_config"};
  for (const auto& [key, value] : config.items()) {
    if (!contains_text(known, key) && !is_unset(value)) {
      warn("{}: the setting {} = {} is unknown and ignored", where, key, to_text(value));
    }
  }
}

// A projection of a layer; of the head, the layer is the number of layers.
struct Module {
  std::int64_t layer = 0;
  Projection which = Projection::q;
  auto operator<=>(const Module&) const = default;
};

std::optional<Module> find_module(std::string_view name, std::int64_t layers) {
  Module module{layers};
  constexpr std::string_view before = "model.layers.";
  if (name.starts_with(before)) {
    const auto read = std::from_chars(name.data() + before.size(), name.data() + name.size(), module.layer);
    if (read.ec != std::errc()) return std::nullopt;
  }
  for (int which = 0; which <= static_cast<int>(Projection::head); ++which) {
    module.which = static_cast<Projection>(which);
    if (module_name(module.layer, module.which) == name) return module;
  }
  return std::nullopt;
}

// Whether target_modules are plain names of projections, which stand for all layers.
bool targets_are_plain(const Json& config) {
  const auto found = config.find("target_modules");
  return found != config.end() && found->is_array() && std::none_of(found->begin(), found->end(), [](const Json& name) {
           return name.is_string() && name.get_ref<const std::string&>().find('.') != std::string::npos;
         });
}

std::set<std::int64_t> listed_layers(const Json& list, const std::string& where) {
  std::set<std::int64_t> layers;
  for (const Json& layer : list.is_array() ? list : Json::array({list})) {
    if (!layer.is_number_integer()) {
      fail("adapter", "{}: layers_to_transform = {} must be layer numbers; save the adapter again with PEFT.", where,
           to_text(list));
    }
    layers.insert(layer.get<std::int64_t>());
  }
  return layers;
}

// Which modules have LoRA matrices is said by the tensors: target_modules and exclude_modules may be regular
// expressions. Layers may be without them only where a setting explains it: else tensors are missing, or the adapter is
// of another model.
std::vector<std::string> target_words(const Json& config, const StoredTensors& stored, std::int64_t layers,
                                      const std::string& where) {
  constexpr std::string_view a_matrix = ".lora_A.weight";
  std::set<Module> modules;
  std::set<Projection> targets;
  std::set<std::int64_t> with;
  for (const auto& [name, tensor] : stored) {
    std::string module = name_from_disk(name);
    if (module.find(".lora_embedding_") != std::string::npos) {
      fail("adapter", "{}: target_modules has the embeddings ({}), which is not supported; {}.", where, module,
           merge_in_peft);
    }
    if (!module.ends_with(a_matrix)) continue;
    module.resize(module.size() - a_matrix.size());
    const std::optional<Module> found = find_module(module, layers);
    if (!found) {
      fail("adapter",
           "{}: target_modules has {}, which is not a projection of a Llama model; is this an adapter for another "
           "model?",
           where, module);
    }
    modules.insert(*found);
    targets.insert(found->which);
    if (found->which != Projection::head) with.insert(found->layer);
  }
  std::vector<std::string_view> names;
  names.reserve(targets.size());
  for (const Projection which : targets) names.push_back(projection_name(which));
  std::vector<std::string> words;
  if (!names.empty()) words.push_back(fmt::format("targets={}", fmt::join(names, ",")));

  const auto given = [&](const char* key) { return config.contains(key) && !is_unset(config[key]); };
  const bool plain = targets_are_plain(config);
  if (plain && !given("layers_to_transform") && !given("exclude_modules")) return words;
  if (plain && given("layers_to_transform")) with = listed_layers(config["layers_to_transform"], where);
  // PEFT's layers_to_transform leaves out the head too, so that beside a head the layers are excluded one by one.
  const bool head = targets.contains(Projection::head);
  if (!head && static_cast<std::int64_t>(with.size()) < layers) {
    words.push_back(fmt::format("layers_to_transform={}", fmt::join(with, ",")));
  }
  if (plain && !given("exclude_modules")) return words;
  std::vector<std::string> excluded;
  for (std::int64_t layer = 0; layer < layers; ++layer) {
    if (!head && !with.contains(layer)) continue;
    for (const Projection which : targets) {
      if (which == Projection::head || modules.contains({layer, which})) continue;
      excluded.push_back(module_name(layer, which).substr(std::string_view("model.").size()));
    }
  }
  if (!excluded.empty()) words.push_back(fmt::format("exclude_modules={}", fmt::join(excluded, ",")));
  return words;
}

}  // namespace

std::vector<std::string> lora_from_peft(const Json& config, const StoredTensors& stored, const ModelConfig& model,
                                        const std::string& where) {
  refuse_settings(config, where);
  warn_of_unknown(config, where);
  const auto text = [&](const char* key, const char* otherwise) {
    const auto found = config.find(key);
    return found == config.end() || found->is_null() ? std::string(otherwise) : to_text(*found);
  };
  std::vector<std::string> words{"rank=" + text("r", "8"), "alpha=" + text("lora_alpha", "8"),
                                 "dropout=" + text("lora_dropout", "0"), "rslora=" + text("use_rslora", "false"),
                                 "dora=" + text("use_dora", "false")};
  for (const std::string& word : target_words(config, stored, model.layers, where)) words.push_back(word);
  return words;
}

}  // namespace tapetune
