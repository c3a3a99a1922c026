// config.json of a Llama-style model: what the sizes are and how positions turn into angles.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tapetune {

enum class Architecture { llama, mistral, qwen2, qwen3, smollm3 };
enum class RopeType { standard, linear, dynamic, yarn, llama3, longrope };

struct RopeConfig {
  RopeType type = RopeType::standard;
  double theta = 10000.0;
  double factor = 1.0;                     // of the context's growth: linear, dynamic, yarn, llama3, longrope
  std::int64_t original_context = 0;       // before extension: yarn, llama3, longrope
  std::optional<double> attention_factor;  // on cos and sin: yarn, longrope
  std::optional<double> mscale, mscale_all_dim;
  double beta_fast = 32.0, beta_slow = 1.0;
  bool truncate = true;
  double low_freq_factor = 1.0, high_freq_factor = 4.0;  // llama3
  std::vector<double> short_factor, long_factor;         // longrope: [head_dim / 2] each

  bool operator==(const RopeConfig&) const = default;
};

// In what layers of one model may differ.
struct LayerSpec {
  bool rotates = true;      // queries and keys are turned by their positions
  std::int64_t window = 0;  // tokens that a token sees, itself included; 0: all before it
  bool operator==(const LayerSpec&) const = default;
};

struct ModelConfig {
  Architecture architecture = Architecture::llama;
  std::int64_t vocab_size = 0;
  std::int64_t hidden_size = 0;
  std::int64_t intermediate_size = 0;
  std::int64_t layers = 0;
  std::int64_t heads = 0;
  std::int64_t kv_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t context = 0;  // max_position_embeddings
  double rms_norm_eps = 1e-6;
  bool qkv_bias = false;
  bool output_bias = false;  // of the attention's output projection
  bool mlp_bias = false;
  bool qk_norm = false;  // an RMSNorm over each head of queries and keys, before they are rotated
  bool tied_embeddings = false;
  std::optional<std::int64_t> bos;
  std::vector<std::int64_t> eos;       // any of these ends a text
  std::vector<LayerSpec> layer_specs;  // one a layer; empty: all are alike, with rotation and no window
  RopeConfig rope;
  std::string position;  // the position encoding, config.json's position.type; empty: it names none
  std::string json;      // the text it was read from; keys that are not ours survive a round trip

  LayerSpec layer(std::int64_t index) const;
  // The longest window of its layers; 0: none has one.
  std::int64_t longest_window() const;
  // The longest sequence that the rotary settings are made for.
  std::int64_t longest_context() const;
};

std::string_view architecture_name(Architecture architecture);  // "LlamaForCausalLM"
std::string_view rope_type_name(RopeType type);                 // "default", "linear", …

std::string rope_scaling_text(const RopeConfig& rope);  // config.json's rope_scaling, as JSON

// `where` names the file in errors.
ModelConfig parse_config(std::string_view json, std::string_view where);

// config.json for a checkpoint with these settings and this dtype ("bfloat16"), readable by transformers 4 and 5.
std::string write_config(const ModelConfig& config, std::string_view dtype);

}  // namespace tapetune
