#include "checkpoint/config.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "core/error.h"
#include "core/json.h"

namespace tapetune {

namespace {

// What transformers assumes for keys that config.json leaves out; it writes only what differs from these.
struct Defaults {
  std::string_view name;        // as in "architectures"
  std::string_view model_type;  // as in "model_type"
  std::int64_t vocab_size, hidden_size, intermediate_size, layers, heads, kv_heads, context;
  std::optional<std::int64_t> bos, eos;
};

constexpr std::array<Defaults, 3> architectures{{
    {"LlamaForCausalLM", "llama", 32000, 4096, 11008, 32, 32, 0, 2048, 1, 2},
    {"MistralForCausalLM", "mistral", 32000, 4096, 14336, 32, 32, 8, 131072, 1, 2},
    {"Qwen2ForCausalLM", "qwen2", 151936, 4096, 22016, 32, 32, 32, 32768, std::nullopt, std::nullopt},
}};

constexpr std::array<std::string_view, 6> rope_types{"default", "linear", "dynamic", "yarn", "llama3", "longrope"};

// One object of the file, with errors that say file, key, rule and value.
class Reader {
 public:
  Reader(const Json& object, std::string_view where, std::string prefix)
      : object_(object), where_(where), prefix_(std::move(prefix)) {}

  const Json* find(const char* key) const {
    const auto found = object_.find(key);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }

  std::int64_t positive(const char* key, std::int64_t fallback) const {
    const Json* value = find(key);
    if (value == nullptr) return fallback;
    // Sizes beyond this would overflow products of two of them.
    constexpr std::int64_t limit = std::int64_t{1} << 31;
    if (!value->is_number_integer() || value->get<double>() < 1 || value->get<double>() > limit) {
      bad(key, "must be a positive whole number", *value);
    }
    return value->get<std::int64_t>();
  }

  std::optional<double> number(const char* key) const {
    const Json* value = find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_number() || !std::isfinite(value->get<double>())) bad(key, "must be a finite number", *value);
    return value->get<double>();
  }

  double positive_number(const char* key, double fallback) const {
    const std::optional<double> value = number(key);
    if (value && *value <= 0) bad(key, "must be greater than 0", *find(key));
    return value.value_or(fallback);
  }

  bool boolean(const char* key, bool fallback) const {
    const Json* value = find(key);
    if (value == nullptr) return fallback;
    if (!value->is_boolean()) bad(key, "must be true or false", *value);
    return value->get<bool>();
  }

  std::string text(const char* key) const {
    const Json* value = find(key);
    if (value == nullptr) return {};
    if (!value->is_string()) bad(key, "must be a text", *value);
    return value->get<std::string>();
  }

  std::vector<double> numbers(const char* key, std::int64_t size) const {
    const Json* value = find(key);
    if (value == nullptr) missing(key);
    std::vector<double> list;
    if (value->is_array()) {
      for (const Json& element : *value) {
        if (!element.is_number() || !std::isfinite(element.get<double>()) || element.get<double>() <= 0) {
          bad(key, "must hold numbers greater than 0", element);
        }
        list.push_back(element.get<double>());
      }
    }
    if (static_cast<std::int64_t>(list.size()) != size) {
      fail("config", "{}: {}{} must hold {} numbers (head_dim / 2), but has {}.", where_, prefix_, key, size,
           list.size());
    }
    return list;
  }

  // One id or a list of ids.
  std::vector<std::int64_t> ids(const char* key) const {
    const Json* value = find(key);
    if (value == nullptr) return {};
    std::vector<std::int64_t> list;
    const Json one = value->is_array() ? *value : Json::array({*value});
    for (const Json& element : one) {
      if (!element.is_number_integer()) bad(key, "must be a token id or a list of them", element);
      if (element.get<std::int64_t>() >= 0) list.push_back(element.get<std::int64_t>());
    }
    return list;
  }

  [[noreturn]] void missing(const char* key, std::string_view why = "this kind of RoPE scaling needs it") const {
    fail("config", "{}: {}{} is missing; {}.", where_, prefix_, key, why);
  }

  [[noreturn]] void bad(const char* key, std::string_view rule, const Json& value) const {
    fail("config", "{}: {}{} {}, but is {}.", where_, prefix_, key, rule, to_text(value));
  }

 private:
  const Json& object_;
  std::string_view where_;
  std::string prefix_;
};

const Defaults& find_architecture(const Json& root, std::string_view where) {
  const auto list = root.find("architectures");
  std::string name;
  if (list != root.end() && list->is_array() && !list->empty() && list->front().is_string()) {
    name = list->front().get<std::string>();
  }
  const auto type = root.find("model_type");
  const std::string model_type = type != root.end() && type->is_string() ? type->get<std::string>() : std::string();
  // What a merge of TAPE writes: a Llama, with tensors of its own beside.
  if (name == "TapeForCausalLM") return architectures[static_cast<std::size_t>(Architecture::llama)];
  for (const Defaults& known : architectures) {
    if (name.empty() ? known.model_type == model_type : known.name == name) return known;
  }
  fail(
      "config",
      "{}: architecture {} is not supported; tapetune reads LlamaForCausalLM, MistralForCausalLM and Qwen2ForCausalLM.",
      where,
      !name.empty()        ? name
      : model_type.empty() ? "(none given)"
                           : model_type);
}

RopeConfig read_rope(const Json& root, std::string_view where, std::int64_t context, std::int64_t head_dim) {
  // transformers 4 has rope_scaling beside rope_theta, transformers 5 one rope_parameters; the former wins.
  const Reader top(root, where, "");
  const char* name =
      top.find("rope_scaling") != nullptr && !top.find("rope_scaling")->empty() ? "rope_scaling" : "rope_parameters";
  const Json* object = top.find(name);
  const Json nothing = Json::object();
  if (object != nullptr && !object->is_object()) top.bad(name, "must be an object", *object);
  const Reader reader(object != nullptr ? *object : nothing, where, std::string(name) + ".");

  RopeConfig rope;
  std::string type = reader.text("rope_type");
  if (type.empty()) type = reader.text("type");
  if (type.empty()) type = "default";
  if (type == "su") type = "longrope";  // its name in the first Phi-3 checkpoints
  const auto known = std::find(rope_types.begin(), rope_types.end(), type);
  if (known == rope_types.end()) {
    fail("config",
         "{}: {}.rope_type {} is not supported; known are default, linear, dynamic, yarn, llama3 and longrope.", where,
         name, type);
  }
  rope.type = static_cast<RopeType>(known - rope_types.begin());
  rope.theta = reader.positive_number("rope_theta", top.positive_number("rope_theta", 10000.0));
  for (const Reader* place : {&top, &reader}) {
    const double partial = place->positive_number("partial_rotary_factor", 1.0);
    if (partial != 1.0) {
      fail("config", "{}: partial_rotary_factor must be 1 (all of a head is rotated), but is {}.", where, partial);
    }
  }

  const auto original_context = [&] {
    return top.positive("original_max_position_embeddings",
                        reader.positive("original_max_position_embeddings", context));
  };
  const auto needed_factor = [&] {
    if (reader.find("factor") == nullptr) reader.missing("factor");
    return reader.positive_number("factor", 1.0);
  };
  switch (rope.type) {
    case RopeType::standard:
      break;
    case RopeType::linear:
    case RopeType::dynamic:
      rope.factor = needed_factor();
      break;
    case RopeType::yarn: {
      rope.original_context = original_context();
      rope.factor =
          reader.positive_number("factor", static_cast<double>(context) / static_cast<double>(rope.original_context));
      rope.attention_factor = reader.number("attention_factor");
      rope.mscale = reader.number("mscale");
      rope.mscale_all_dim = reader.number("mscale_all_dim");
      rope.beta_fast = reader.positive_number("beta_fast", 32.0);
      rope.beta_slow = reader.positive_number("beta_slow", 1.0);
      rope.truncate = reader.boolean("truncate", true);
      break;
    }
    case RopeType::llama3: {
      rope.factor = needed_factor();
      rope.original_context = original_context();
      if (reader.find("low_freq_factor") == nullptr) reader.missing("low_freq_factor");
      if (reader.find("high_freq_factor") == nullptr) reader.missing("high_freq_factor");
      rope.low_freq_factor = reader.positive_number("low_freq_factor", 1.0);
      rope.high_freq_factor = reader.positive_number("high_freq_factor", 4.0);
      if (rope.high_freq_factor <= rope.low_freq_factor) {
        fail("config", "{}: {}.high_freq_factor must be greater than low_freq_factor {}, but is {}.", where, name,
             rope.low_freq_factor, rope.high_freq_factor);
      }
      break;
    }
    case RopeType::longrope: {
      rope.original_context = original_context();
      rope.factor =
          reader.positive_number("factor", static_cast<double>(context) / static_cast<double>(rope.original_context));
      rope.attention_factor = reader.number("attention_factor");
      rope.short_factor = reader.numbers("short_factor", head_dim / 2);
      rope.long_factor = reader.numbers("long_factor", head_dim / 2);
      break;
    }
  }
  return rope;
}

Json rope_scaling_json(const RopeConfig& rope) {
  Json scaling = Json::object();
  scaling["rope_type"] = rope_type_name(rope.type);
  if (rope.type != RopeType::standard) scaling["factor"] = rope.factor;
  if (rope.original_context > 0) scaling["original_max_position_embeddings"] = rope.original_context;
  if (rope.attention_factor) scaling["attention_factor"] = *rope.attention_factor;
  if (rope.type == RopeType::yarn) {
    const RopeConfig plain;
    if (rope.mscale) scaling["mscale"] = *rope.mscale;
    if (rope.mscale_all_dim) scaling["mscale_all_dim"] = *rope.mscale_all_dim;
    if (rope.beta_fast != plain.beta_fast) scaling["beta_fast"] = rope.beta_fast;
    if (rope.beta_slow != plain.beta_slow) scaling["beta_slow"] = rope.beta_slow;
    if (!rope.truncate) scaling["truncate"] = false;
  }
  if (rope.type == RopeType::llama3) {
    scaling["low_freq_factor"] = rope.low_freq_factor;
    scaling["high_freq_factor"] = rope.high_freq_factor;
  }
  if (rope.type == RopeType::longrope) {
    scaling["short_factor"] = rope.short_factor;
    scaling["long_factor"] = rope.long_factor;
  }
  return scaling;
}

std::string read_position(const Reader& reader, std::string_view where) {
  const Json* position = reader.find("position");
  if (position == nullptr) return {};
  if (!position->is_object()) reader.bad("position", "must be an object", *position);
  const Reader fields(*position, where, "position.");
  const std::string type = fields.text("type");
  if (type.empty()) fields.missing("type", "it names the position encoding");
  if (type == "rope" && position->size() > 1) reader.bad("position", "takes no options for rope", *position);
  return type;
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
  const std::string method = Reader(quantized, where, "quantization_config.").text("quant_method");
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

std::string_view rope_type_name(RopeType type) { return rope_types[static_cast<std::size_t>(type)]; }

LayerSpec ModelConfig::layer(std::int64_t index) const {
  return layer_specs.empty() ? LayerSpec() : layer_specs[static_cast<std::size_t>(index)];
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
  const Reader reader(root, where, "");

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
  if (reader.find("head_dim") == nullptr && config.hidden_size % config.heads != 0) {
    fail("config", "{}: hidden_size {} must be a multiple of num_attention_heads {} where head_dim is not given.",
         where, config.hidden_size, config.heads);
  }
  config.head_dim = reader.positive("head_dim", config.hidden_size / config.heads);
  if (config.head_dim % 2 != 0)
    fail("config", "{}: head_dim must be even to be rotated, but is {}.", where, config.head_dim);
  config.context = reader.positive("max_position_embeddings", defaults.context);
  config.rms_norm_eps = reader.positive_number("rms_norm_eps", 1e-6);
  const std::string activation = reader.text("hidden_act");
  if (!activation.empty() && activation != "silu" && activation != "swish") {
    fail("config", "{}: hidden_act must be silu, but is {}.", where, activation);
  }
  const bool llama = config.architecture == Architecture::llama;
  const bool attention_bias = llama && reader.boolean("attention_bias", false);
  config.qkv_bias = attention_bias || config.architecture == Architecture::qwen2;
  config.output_bias = llama && reader.boolean("attention_output_bias", attention_bias);  // a merged TAPE's key
  config.mlp_bias = llama && reader.boolean("mlp_bias", false);
  config.tied_embeddings = reader.boolean("tie_word_embeddings", false);

  const bool windowed = config.architecture == Architecture::mistral
                            ? !root.contains("sliding_window") || reader.find("sliding_window")
                        : config.architecture == Architecture::qwen2 ? reader.boolean("use_sliding_window", false)
                                                                     : false;
  if (windowed) {
    const std::int64_t window = reader.positive("sliding_window", 4096);
    if (window < config.context) config.sliding_window = window;
  }

  const std::vector<std::int64_t> bos = reader.ids("bos_token_id");
  config.bos = !bos.empty() ? std::optional(bos.front()) : root.contains("bos_token_id") ? std::nullopt : defaults.bos;
  config.eos = reader.ids("eos_token_id");
  if (!root.contains("eos_token_id") && defaults.eos) config.eos = {*defaults.eos};
  config.rope = read_rope(root, where, config.context, config.head_dim);
  config.position = read_position(reader, where);
  return config;
}

std::string rope_scaling_text(const RopeConfig& rope) { return to_text(rope_scaling_json(rope)); }

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
  if (config.head_dim * config.heads != config.hidden_size || root.contains("head_dim"))
    root["head_dim"] = config.head_dim;
  root["max_position_embeddings"] = config.context;
  root["rms_norm_eps"] = config.rms_norm_eps;
  root["tie_word_embeddings"] = config.tied_embeddings;
  if (config.architecture == Architecture::llama) {
    root["attention_bias"] = config.output_bias;
    root["mlp_bias"] = config.mlp_bias;
  }
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
