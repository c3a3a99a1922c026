#include "adapters/positions/own_architecture.h"

#include <algorithm>

namespace tapetune {

void write_position(Json& json, const ModelConfig& config, Json position) {
  json["position"] = std::move(position);
  json["head_dim"] = config.head_dim;
  json["bos_token_id"] = config.bos ? Json(*config.bos) : Json();
  json["eos_token_id"] = config.eos.empty() ? Json() : config.eos.size() == 1 ? Json(config.eos[0]) : Json(config.eos);
  json["attention_bias"] = config.qkv_bias;
  json["attention_output_bias"] = config.output_bias;
  json["mlp_bias"] = config.mlp_bias;
  // In keys of its own: from transformers' keys, its caches would be cut to windows that this model may not have.
  for (const char* key : {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "no_rope_layers",
                          "no_rope_layer_interval"}) {
    json.erase(key);
  }
  if (config.qk_norm) json["qk_norm"] = true;
  const auto by_layer = [&](const char* key, bool needed, const auto& value_of) {
    json.erase(key);
    for (std::int64_t i = 0; needed && i < config.layers; ++i) json[key].push_back(value_of(config.layer(i)));
  };
  const bool rotates = std::ranges::all_of(config.layer_specs, [](const LayerSpec& layer) { return layer.rotates; });
  by_layer("attention_windows", config.longest_window() > 0, [](const LayerSpec& layer) { return layer.window; });
  by_layer("rotary_layers", !rotates, [](const LayerSpec& layer) { return layer.rotates ? 1 : 0; });
}

void export_own_architecture(const Settings& settings, const ModelConfig& config, const std::filesystem::path&,
                             Files& files) {
  Json json = parse_json(files.at("config.json"), "merge", "config.json");
  json["model_type"] = "tapetune_llama";
  json["architectures"] = Json::array({"TapetuneForCausalLM"});
  Json position = settings_json("type", settings);
  write_position(json, config, std::move(position));
  files["config.json"] = to_text(json, 2) + "\n";
}

}  // namespace tapetune
