#include "checkpoint/config.h"

#include <algorithm>
#include <array>

#include "checkpoint/config_reader.h"
#include "core/error.h"
#include "core/json.h"

namespace tapetune {

namespace {

// What transformers assumes for keys that config.json leaves out; it writes only what differs from these.
struct Defaults {
  std::string_view name;        // as in "architectures"
  std::string_view model_type;  // as in "model_type"
  std::int64_t vocab_size, hidden_size, intermediate_size, layers, heads;
  std::int64_t kv_heads;  // 0: as many as heads
  std::int64_t context;
  std::optional<std::int64_t> bos = {}, eos = {};
  std::int64_t head_dim = 0;  // 0: hidden_size / heads
  double theta = 10000.0;
  bool tied_embeddings = false;
};

// In the order of Architecture.
constexpr std::array<Defaults, 5> architectures{{
    {"LlamaForCausalLM", "llama", 32000, 4096, 11008, 32, 32, 0, 2048, 1, 2},
    {.name = "MistralForCausalLM",
     .model_type = "mistral",
     .vocab_size = 32000,
     .hidden_size = 4096,
     .intermediate_size = 14336,
     .layers = 32,
     .heads = 32,
     .kv_heads = 8,
     .context = 131072,
     .bos = 1,
     .eos = 2},
    {.name = "Qwen2ForCausalLM",
     .model_type = "qwen2",
     .vocab_size = 151936,
     .hidden_size = 4096,
     .intermediate_size = 22016,
     .layers = 32,
     .heads = 32,
     .kv_heads = 32,
     .context = 32768},
    {.name = "Qwen3ForCausalLM",
     .model_type = "qwen3",
     .vocab_size = 151936,
     .hidden_size = 4096,
     .intermediate_size = 22016,
     .layers = 32,
     .heads = 32,
     .kv_heads = 32,
     .context = 32768,
     .head_dim = 128},
    {.name = "SmolLM3ForCausalLM",
     .model_type = "smollm3",
     .vocab_size = 128256,
     .hidden_size = 2048,
     .intermediate_size = 11008,
     .layers = 36,
     .heads = 16,
     .kv_heads = 4,
     .context = 32768,
     .bos = 128000,
     .eos = 128001,
     .theta = 2e6,
     .tied_embeddings = true},
}};

// What merges write whose positions transformers does not have: read as a Llama, with keys of its own for what
// transformers' Llama does not have either.
constexpr std::array<std::string_view, 2> own_architectures{"TapeForCausalLM", "TapetuneForCausalLM"};

std::string named_architecture(const Json& root) {
  const auto list = root.find("architectures");
  if (list == root.end() || !list->is_array() || list->empty() || !list->front().is_string()) return {};
  return list->front().get<std::string>();
}

bool is_own_architecture(const Json& root) {
  return std::ranges::find(own_architectures, named_architecture(root)) != own_architectures.end();
}

const Defaults& find_architecture(const Json& root, std::string_view where) {
  const std::string name = named_architecture(root);
  const auto type = root.find("model_type");
  const std::string model_type = type != root.end() && type->is_string() ? type->get<std::string>() : std::string();
  if (is_own_architecture(root)) return architectures[static_cast<std::size_t>(Architecture::llama)];
  std::vector<std::string_view> supported;
  for (const Defaults& known : architectures) {
    if (name.empty() ? known.model_type == model_type : known.name == name) return known;
    supported.push_back(known.name);
  }
  const std::string asked = !name.empty() ? name : model_type.empty() ? "(none given)" : model_type;
  fail("config", "{}: architecture {} is not supported; tapetune reads {}.", where, asked, fmt::join(supported, ", "));
}

std::string read_position(const ConfigReader& reader, std::string_view where) {
  const Json* position = reader.find("position");
  if (position == nullptr) return {};
  if (!position->is_object()) reader.bad("position", "must be an object", *position);
  const ConfigReader fields(*position, where, "position.");
  const std::string type = fields.text("type");
  if (type.empty()) fields.missing("type", "it names the position encoding");
  if (type == "rope" && position->size() > 1) reader.bad("position", "takes no options for rope", *position);
  return type;
}

// Whether config.json says which projections have a bias; else the architecture does.
bool states_attention_bias(Architecture architecture) {
  return architecture == Architecture::llama || architecture == Architecture::qwen3 ||
         architecture == Architecture::smollm3;
}
bool states_mlp_bias(Architecture architecture) {
  return architecture == Architecture::llama || architecture == Architecture::smollm3;
}

// Packed integers have other names and shapes than weights; the error should say why.
void refuse_quantized(const Json& root, std::string_view where) {
  const auto found = root.find("quantization_config");
  if (found == root.end() || !found->is_object() || found->empty()) return;
  const Json& quantized = *found;
  const auto number = [&](const char* key) {
    return quantized.contains(key) && quantized[key].is_number_integer() ? quantized[key].get<std::int64_t>() : 0;
  };
  const auto set = [&](const char* key) { return quantized.contains(key) && quantized[key] == true; };
  const std::string method = ConfigReader(quantized, where, "quantization_config.").text("quant_method");
  const std::int64_t bits = set("load_in_4bit") || set("_load_in_4bit")   ? 4
                            : set("load_in_8bit") || set("_load_in_8bit") ? 8
                            : number("bits") > 0                          ? number("bits")
                                                                          : number("w_bit");
  fail("config",
       "{}: the weights are quantized (quantization_config: {}{}), which tapetune does not read; use the model before "
       "quantization, with F32, F16 or BF16 weights.",
       where, method.empty() ? "no quant_method" : method, bits > 0 ? fmt::format(", {} bits", bits) : "");
}

}  // namespace

std::string_view architecture_name(Architecture architecture) {
  return architectures[static_cast<std::size_t>(architecture)].name;
}

LayerSpec ModelConfig::layer(std::int64_t index) const {
  return layer_specs.empty() ? LayerSpec() : layer_specs[static_cast<std::size_t>(index)];
}

std::int64_t ModelConfig::longest_window() const {
  std::int64_t longest = 0;
  for (const LayerSpec& spec : layer_specs) longest = std::max(longest, spec.window);
  return longest;
}

std::int64_t ModelConfig::longest_context() const {
  // Dynamic scaling is the one kind whose max_position_embeddings stays that of the original model.
  if (rope.type != RopeType::dynamic) return context;
  constexpr double limit = static_cast<double>(std::int64_t{1} << 31);
  return static_cast<std::int64_t>(std::min(static_cast<double>(context) * rope.factor, limit));
}

ModelConfig parse_config(std::string_view json, std::string_view where) {
  const Json root = parse_json(json, "config", where);
  if (!root.is_object()) fail("config", "{}: must be a JSON object.", where);
  refuse_quantized(root, where);
  const Defaults& defaults = find_architecture(root, where);
  const ConfigReader reader(root, where, "");

  ModelConfig config;
  config.json = json;
  config.architecture = static_cast<Architecture>(&defaults - architectures.data());
  config.vocab_size = reader.positive("vocab_size", defaults.vocab_size);
  config.hidden_size = reader.positive("hidden_size", defaults.hidden_size);
  config.intermediate_size = reader.positive("intermediate_size", defaults.intermediate_size);
  config.layers = reader.positive("num_hidden_layers", defaults.layers);
  config.heads = reader.positive("num_attention_heads", defaults.heads);
  // A null means "as many as heads"; a missing key means the architecture's default.
  const bool kv_null = root.contains("num_key_value_heads") && root["num_key_value_heads"].is_null();
  config.kv_heads =
      reader.positive("num_key_value_heads", kv_null || defaults.kv_heads == 0 ? config.heads : defaults.kv_heads);
  if (config.heads % config.kv_heads != 0) {
    fail("config", "{}: num_attention_heads {} must be a multiple of num_key_value_heads {}.", where, config.heads,
         config.kv_heads);
  }
  if (reader.find("head_dim") == nullptr && defaults.head_dim == 0 && config.hidden_size % config.heads != 0) {
    fail("config", "{}: hidden_size {} must be a multiple of num_attention_heads {} where head_dim is not given.",
         where, config.hidden_size, config.heads);
  }
  config.head_dim =
      reader.positive("head_dim", defaults.head_dim > 0 ? defaults.head_dim : config.hidden_size / config.heads);
  if (config.head_dim % 2 != 0)
    fail("config", "{}: head_dim must be even to be rotated, but is {}.", where, config.head_dim);
  config.context = reader.positive("max_position_embeddings", defaults.context);
  config.rms_norm_eps = reader.positive_number("rms_norm_eps", 1e-6);
  const std::string activation = reader.text("hidden_act");
  if (!activation.empty() && activation != "silu" && activation != "swish") {
    fail("config", "{}: hidden_act must be silu, but is {}.", where, activation);
  }
  const bool attention_bias = states_attention_bias(config.architecture) && reader.boolean("attention_bias", false);
  config.qkv_bias = attention_bias || config.architecture == Architecture::qwen2;
  // A merged TAPE's key, for what was a Qwen2.
  config.output_bias = config.architecture == Architecture::llama
                           ? reader.boolean("attention_output_bias", attention_bias)
                           : attention_bias;
  config.mlp_bias = states_mlp_bias(config.architecture) && reader.boolean("mlp_bias", false);
  config.qk_norm =
      config.architecture == Architecture::qwen3 || (is_own_architecture(root) && reader.boolean("qk_norm", false));
  config.tied_embeddings = reader.boolean("tie_word_embeddings", defaults.tied_embeddings);
  read_layers(root, reader, is_own_architecture(root), config);

  const std::vector<std::int64_t> bos = reader.ids("bos_token_id");
  config.bos = !bos.empty() ? std::optional(bos.front()) : root.contains("bos_token_id") ? std::nullopt : defaults.bos;
  config.eos = reader.ids("eos_token_id");
  if (!root.contains("eos_token_id") && defaults.eos) config.eos = {*defaults.eos};
  config.rope = read_rope(root, where, config.context, config.head_dim, defaults.theta);
  config.position = read_position(reader, where);
  return config;
}

std::string write_config(const ModelConfig& config, std::string_view dtype) {
  Json root = config.json.empty() ? Json::object() : parse_json(config.json, "config", "config.json");
  root["architectures"] = Json::array({architecture_name(config.architecture)});
  root["model_type"] = architectures[static_cast<std::size_t>(config.architecture)].model_type;
  root["vocab_size"] = config.vocab_size;
  root["hidden_size"] = config.hidden_size;
  root["intermediate_size"] = config.intermediate_size;
  root["num_hidden_layers"] = config.layers;
  root["num_attention_heads"] = config.heads;
  root["num_key_value_heads"] = config.kv_heads;
  const bool usual_width = architectures[static_cast<std::size_t>(config.architecture)].head_dim == 0 &&
                           config.head_dim * config.heads == config.hidden_size;
  if (!usual_width || root.contains("head_dim")) root["head_dim"] = config.head_dim;
  root["max_position_embeddings"] = config.context;
  root["rms_norm_eps"] = config.rms_norm_eps;
  root["tie_word_embeddings"] = config.tied_embeddings;
  if (states_attention_bias(config.architecture)) root["attention_bias"] = config.output_bias;
  if (states_mlp_bias(config.architecture)) root["mlp_bias"] = config.mlp_bias;
  write_layers(root, config);
  // transformers 4 reads only these two; transformers 5 turns them into its rope_parameters.
  root.erase("rope_parameters");
  // transformers 4 looks for longrope's original context at the top level; 5 takes it from there too.
  if (config.rope.type == RopeType::longrope) {
    root["original_max_position_embeddings"] = config.rope.original_context;
  } else {
    root.erase("original_max_position_embeddings");
  }
  root["rope_theta"] = config.rope.theta;
  root["rope_scaling"] = config.rope.type == RopeType::standard ? Json() : rope_scaling_json(config.rope);
  root.erase("dtype");
  root["torch_dtype"] = dtype;
  return to_text(root, 2) + "\n";
}

}  // namespace tapetune
