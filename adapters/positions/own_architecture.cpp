#include "adapters/positions/own_architecture.h"

namespace tapetune {

void write_position(Json& json, const ModelConfig& config, Json position) {
  json["position"] = std::move(position);
  json["head_dim"] = config.head_dim;
  json["bos_token_id"] = config.bos ? Json(*config.bos) : Json();
  json["eos_token_id"] = config.eos.empty() ? Json() : config.eos.size() == 1 ? Json(config.eos[0]) : Json(config.eos);
  json["attention_bias"] = config.qkv_bias;
  json["attention_output_bias"] = config.output_bias;
  json["mlp_bias"] = config.mlp_bias;
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
