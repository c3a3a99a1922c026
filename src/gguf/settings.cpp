#include "gguf/settings.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/error.h"
#include "core/json.h"
#include "core/log.h"
#include "gguf/names.h"

namespace tapetune::gguf {

namespace {

// The divisor of the frequency that belongs to this wave length.
double llama3_factor(const RopeConfig& rope, double length) {
  const auto original = static_cast<double>(rope.original_context);
  if (length < original / rope.high_freq_factor) return 1;
  if (length > original / rope.low_freq_factor) return rope.factor;
  const double smooth = (original / length - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor);
  return 1 / ((1 - smooth) / rope.factor + smooth);
}

std::vector<double> wave_lengths(double theta, std::int64_t head_dim) {
  std::vector<double> lengths;
  for (std::int64_t i = 0; i < head_dim; i += 2) {
    lengths.push_back(2 * M_PI * std::pow(theta, static_cast<double>(i) / static_cast<double>(head_dim)));
  }
  return lengths;
}

// The settings that give these divisors. Three numbers (original context, low and high) share one degree of freedom, so
// low and high are taken to be 1 and 4, as in every Llama 3; the first divisor in between then tells the context.
RopeConfig llama3_from(const std::vector<float>& factors, double theta, const std::string& where) {
  const auto head_dim = static_cast<std::int64_t>(2 * factors.size());
  RopeConfig rope;
  rope.type = RopeType::llama3;
  rope.theta = theta;
  rope.factor = std::stod(fmt::format("{}", *std::max_element(factors.begin(), factors.end())));  // 3.3, not 3.29999995
  rope.original_context = 8192;
  const std::vector<double> lengths = wave_lengths(theta, head_dim);
  for (std::size_t i = 0; i < factors.size(); ++i) {
    if (factors[i] <= 1 || factors[i] >= rope.factor) continue;
    const double smooth = (1 / factors[i] - 1 / rope.factor) / (1 - 1 / rope.factor);
    const double context = lengths[i] * (1 + 3 * smooth);
    if (context >= 1 && context < 1e9) rope.original_context = std::llround(context);
    break;
  }
  const std::vector<float> expected = llama3_factors(rope, head_dim);
  for (std::size_t i = 0; i < factors.size(); ++i) {
    if (!(std::fabs(factors[i] - expected[i]) <= 1e-3 * expected[i])) {
      fail("gguf",
           "{}: {} divides frequency {} by {}, which Llama 3's scaling (factor {}, original context {}) does not; "
           "config.json cannot express this; use the original Hugging Face model.",
           where, rope_factors_name, i, factors[i], rope.factor, rope.original_context);
    }
  }
  return rope;
}

// The keys of one architecture: "llama.block_count" and so on.
class Keys {
 public:
  Keys(const File& file, std::string prefix) : file_(file), prefix_(std::move(prefix)) {}

  std::optional<std::int64_t> whole(std::string_view name) const { return file_.whole(prefix_ + std::string(name)); }
  std::optional<double> number(std::string_view name) const { return file_.number(prefix_ + std::string(name)); }
  std::optional<std::string> text(std::string_view name) const { return file_.text(prefix_ + std::string(name)); }

  template <typename T>
  T needed(std::optional<T> value, std::string_view name) const {
    if (!value) fail("gguf", "{}: {}{} is missing; the file is not a whole model.", file_.where(), prefix_, name);
    return *value;
  }
  std::int64_t needed(std::string_view name) const { return needed(whole(name), name); }

  // A setting that tapetune has no place for, and that changes what the model computes.
  void only(std::string_view name, double allowed) const {
    const double value = number(name).value_or(allowed);
    if (value != allowed) {
      fail("gguf", "{}: {}{} is {}, but tapetune reads only models where it is {}.", file_.where(), prefix_, name,
           value, allowed);
    }
  }

  const std::string& where() const { return file_.where(); }

 private:
  const File& file_;
  std::string prefix_;
};

Json read_scaling(const File& file, const Keys& keys, double theta, std::int64_t head_dim) {
  const std::string type = keys.text("rope.scaling.type").value_or("linear");  // as llama.cpp assumes
  const double factor = keys.number("rope.scaling.factor").value_or(keys.number("rope.scale_linear").value_or(0));
  const StoredBlocks* stored = file.tensor(rope_factors_name);
  if (stored != nullptr) {
    if (stored->format->type != TensorType::f32 || stored->shape != std::vector<std::int64_t>{head_dim / 2}) {
      fail("gguf", "{}: {} must be F32 with {} numbers.", file.where(), rope_factors_name, head_dim / 2);
    }
    std::vector<float> factors(stored->bytes.size() / sizeof(float));
    std::memcpy(factors.data(), stored->bytes.data(), stored->bytes.size());
    if (factor != 0 && factor != 1) {
      fail("gguf", "{}: has both {} and a scaling factor of {}, which config.json cannot express together.",
           file.where(), rope_factors_name, factor);
    }
    if (std::all_of(factors.begin(), factors.end(), [](float each) { return each == 1; })) return nullptr;
    const RopeConfig rope = llama3_from(factors, theta, file.where());
    return {{"rope_type", "llama3"},
            {"factor", rope.factor},
            {"low_freq_factor", rope.low_freq_factor},
            {"high_freq_factor", rope.high_freq_factor},
            {"original_max_position_embeddings", rope.original_context}};
  }
  if (type == "none") return nullptr;
  if (type == "linear") {
    if (factor == 0 || factor == 1) return nullptr;
    return {{"rope_type", "linear"}, {"factor", factor}};
  }
  if (type != "yarn") {
    fail("gguf", "{}: rope.scaling.type is {}, but tapetune reads none, linear and yarn.", file.where(), type);
  }
  keys.only("rope.scaling.yarn_ext_factor", 1);
  keys.only("rope.scaling.yarn_attn_factor", 1);
  keys.only("rope.scaling.yarn_log_multiplier", 0);
  Json yarn = {{"rope_type", "yarn"},
               {"factor", keys.needed(keys.number("rope.scaling.factor"), "rope.scaling.factor")},
               {"original_max_position_embeddings", keys.needed("rope.scaling.original_context_length")}};
  if (const auto fast = keys.number("rope.scaling.yarn_beta_fast")) yarn["beta_fast"] = *fast;
  if (const auto slow = keys.number("rope.scaling.yarn_beta_slow")) yarn["beta_slow"] = *slow;
  // llama.cpp multiplies its own 0.1 ln(factor) + 1 by this; config.json states the product.
  const double attention = keys.number("rope.scaling.attn_factor").value_or(1);
  if (attention != 1) yarn["attention_factor"] = attention * (0.1 * std::log(factor) + 1);
  return yarn;
}

void add_token_ids(Json& json, const File& file) {
  const auto id = [&](const char* name) { return file.whole(fmt::format("tokenizer.ggml.{}_token_id", name)); };
  const auto or_null = [](std::optional<std::int64_t> value) { return value ? Json(*value) : Json(); };
  const bool sentencepiece = file.text("tokenizer.ggml.model") == "llama";  // whose ids llama.cpp knows unsaid
  json["bos_token_id"] = or_null(id("bos") ? id("bos") : sentencepiece ? std::optional<std::int64_t>(1) : std::nullopt);
  const auto eos = id("eos") ? id("eos") : sentencepiece ? std::optional<std::int64_t>(2) : std::nullopt;
  json["eos_token_id"] = or_null(eos);
  // The end of a turn ends a text as well.
  if (eos && id("eot") && id("eot") != eos) json["eos_token_id"] = Json::array({*eos, *id("eot")});
  if (id("padding") || json["model_type"] == "smollm3")
    json["pad_token_id"] = or_null(id("padding"));  // it assumes one
}

// Every fourth layer of llama.cpp's smollm3 does not rotate; no key says so.
constexpr std::int64_t rotation_interval = 4;

void refuse_unsayable(const ModelConfig& config) {
  const std::string_view name = llama_cpp_name(config.architecture);
  if (config.architecture == Architecture::qwen2 && config.head_dim * config.heads != config.hidden_size) {
    fail("gguf",
         "llama.cpp's qwen2 has heads as wide as {} / {}, but these are {} wide; such a model cannot be written.",
         config.hidden_size, config.heads, config.head_dim);
  }
  const bool without_bias = config.architecture == Architecture::qwen3 || config.architecture == Architecture::smollm3;
  if (without_bias && (config.qkv_bias || config.output_bias || config.mlp_bias)) {
    fail("gguf", "llama.cpp's {} has no biases, but this model has; it cannot be written.", name);
  }
  for (std::int64_t i = 0; i < config.layers; ++i) {
    const bool rotates = config.architecture != Architecture::smollm3 || (i + 1) % rotation_interval != 0;
    if (config.layer(i).rotates == rotates) continue;
    fail("gguf", "layer {} {}, unlike in llama.cpp's {}; such a model cannot be written.", i,
         rotates ? "does not rotate queries and keys" : "rotates queries and keys", name);
  }
}

}  // namespace

std::vector<float> llama3_factors(const RopeConfig& rope, std::int64_t head_dim) {
  std::vector<float> factors;
  for (const double length : wave_lengths(rope.theta, head_dim)) {
    factors.push_back(static_cast<float>(llama3_factor(rope, length)));
  }
  return factors;
}

ModelConfig read_settings(const File& file) {
  if (file.whole("split.count").value_or(1) > 1) {
    fail("gguf", "{}: is one of {} parts; join them with llama.cpp's llama-gguf-split --merge first.", file.where(),
         *file.whole("split.count"));
  }
  const std::optional<std::string> architecture = file.text("general.architecture");
  if (!architecture) fail("gguf", "{}: general.architecture is missing; the file is not a model.", file.where());
  const std::optional<Architecture> known = architecture_from_llama_cpp(*architecture);
  if (!known) {
    fail("gguf", "{}: architecture {} is not supported; tapetune imports {}.", file.where(), *architecture,
         llama_cpp_names());
  }
  const Keys keys(file, *architecture + ".");
  keys.only("expert_count", 0);
  const StoredBlocks* embedding = file.tensor("token_embd.weight");
  if (embedding == nullptr || embedding->shape.size() != 2) {
    fail("gguf", "{}: has no tensor token_embd.weight with rows for tokens; the file is not a whole model.",
         file.where());
  }
  const std::int64_t layers = keys.needed("block_count");
  if (layers < 1 || static_cast<std::uint64_t>(layers) > file.tensors().size()) {
    fail("gguf", "{}: says that it has {} layers, but holds {} tensors in all; the file is damaged.", file.where(),
         layers, file.tensors().size());
  }
  const std::int64_t heads = keys.needed("attention.head_count"), width = keys.needed("embedding_length");
  const std::int64_t head_dim =
      keys.whole("attention.key_length").value_or(heads > 0 ? width / heads : 0);  // a bad one is found below
  keys.only("attention.value_length", static_cast<double>(head_dim));
  keys.only("rope.dimension_count", static_cast<double>(head_dim));
  const double theta = keys.number("rope.freq_base").value_or(10000);

  Json json;
  json["architectures"] = Json::array({architecture_name(*known)});
  json["model_type"] = *architecture;
  json["vocab_size"] = embedding->shape.front();
  json["hidden_size"] = width;
  json["intermediate_size"] = keys.needed("feed_forward_length");
  json["num_hidden_layers"] = layers;
  json["num_attention_heads"] = heads;
  json["num_key_value_heads"] = keys.whole("attention.head_count_kv").value_or(heads);
  json["head_dim"] = head_dim;
  json["max_position_embeddings"] = keys.needed("context_length");
  const char* epsilon = "attention.layer_norm_rms_epsilon";
  json["rms_norm_eps"] = keys.needed(keys.number(epsilon), epsilon);
  json["hidden_act"] = "silu";
  json["tie_word_embeddings"] = file.tensor("output.weight") == nullptr;
  if (*known != Architecture::qwen2) {
    json["attention_bias"] = file.tensor("blk.0.attn_q.bias") != nullptr;
    json["mlp_bias"] = file.tensor("blk.0.ffn_gate.bias") != nullptr;
  }
  if (*known == Architecture::smollm3) json["no_rope_layer_interval"] = rotation_interval;
  json["rope_theta"] = theta;
  json["rope_scaling"] = read_scaling(file, keys, theta, head_dim);
  json["use_cache"] = true;
  add_token_ids(json, file);
  return parse_config(to_text(json), file.where());
}

void write_settings(Metadata& metadata, const ModelConfig& config) {
  refuse_unsayable(config);
  const std::string prefix = fmt::format("{}.", llama_cpp_name(config.architecture));
  const auto whole = [&](const char* name, std::int64_t value) { metadata.whole(prefix + name, value); };
  const auto number = [&](const char* name, double value) { metadata.number(prefix + name, value); };
  whole("block_count", config.layers);
  whole("context_length", config.context);
  whole("embedding_length", config.hidden_size);
  whole("feed_forward_length", config.intermediate_size);
  whole("attention.head_count", config.heads);
  whole("attention.head_count_kv", config.kv_heads);
  whole("attention.key_length", config.head_dim);
  whole("attention.value_length", config.head_dim);
  number("attention.layer_norm_rms_epsilon", config.rms_norm_eps);
  whole("vocab_size", config.vocab_size);
  whole("rope.dimension_count", config.head_dim);
  const RopeConfig& rope = config.rope;
  number("rope.freq_base", rope.theta);
  if (const std::int64_t window = config.longest_window(); window > 0 && window < config.longest_context()) {
    warn("llama.cpp's {} has no sliding window: past {} tokens its results differ from those of this model",
         llama_cpp_name(config.architecture), window);
  }
  switch (rope.type) {
    case RopeType::standard:
    case RopeType::llama3:  // a tensor of its own
      break;
    case RopeType::linear:
      metadata.text(prefix + "rope.scaling.type", "linear");
      number("rope.scaling.factor", rope.factor);
      break;
    case RopeType::yarn: {
      const RopeConfig plain;
      const double own = 0.1 * std::log(rope.factor) + 1;
      const bool scaled = (rope.attention_factor && std::fabs(*rope.attention_factor - own) > 1e-6) ||
                          (rope.mscale.value_or(0) != 0 && rope.mscale_all_dim.value_or(0) != 0);
      if (scaled || !rope.truncate || rope.factor < 1) {
        fail("gguf",
             "llama.cpp's yarn has an attention factor of {:.4f} and whole dimensions; attention_factor, mscale and "
             "truncate cannot be written.",
             own);
      }
      metadata.text(prefix + "rope.scaling.type", "yarn");
      number("rope.scaling.factor", rope.factor);
      whole("rope.scaling.original_context_length", rope.original_context);
      if (rope.beta_fast != plain.beta_fast) number("rope.scaling.yarn_beta_fast", rope.beta_fast);
      if (rope.beta_slow != plain.beta_slow) number("rope.scaling.yarn_beta_slow", rope.beta_slow);
      break;
    }
    case RopeType::dynamic:
    case RopeType::longrope:
      fail("gguf", "llama.cpp has no {} rotary scaling for this architecture; linear, yarn and llama3 can be written.",
           rope_type_name(rope.type));
  }
}

}  // namespace tapetune::gguf
