#include "checkpoint/config.h"
#include "catch.h"
#include "core/json.h"
#include "support.h"

namespace config_test {

using namespace tapetune;

namespace {

ModelConfig parse(const std::string& json) { return parse_config(json, "config.json"); }

std::string llama(const std::string& more) {
  return R"({"architectures": ["LlamaForCausalLM"])" + (more.empty() ? "" : ", " + more) + "}";
}

}  // namespace

TEST_CASE("what config.json leaves out is what transformers assumes") {
  const ModelConfig llama2 = parse(llama(""));
  CHECK(llama2.hidden_size == 4096);
  CHECK(llama2.kv_heads == 32);
  CHECK(llama2.head_dim == 128);
  CHECK(llama2.context == 2048);
  CHECK(llama2.eos == std::vector<std::int64_t>{2});
  const ModelConfig mistral = parse(R"({"architectures": ["MistralForCausalLM"], "sliding_window": null})");
  CHECK(mistral.kv_heads == 8);
  CHECK(mistral.context == 131072);
  CHECK(mistral.longest_window() == 0);
  CHECK(parse(R"({"architectures": ["MistralForCausalLM"]})").layer(31).window == 4096);
  CHECK(parse(R"({"architectures": ["MistralForCausalLM"], "num_key_value_heads": null})").kv_heads == 32);
  const ModelConfig qwen = parse(R"({"model_type": "qwen2", "eos_token_id": [5, 6]})");
  CHECK(qwen.qkv_bias);
  CHECK_FALSE(qwen.output_bias);
  CHECK(qwen.eos == std::vector<std::int64_t>{5, 6});
}

TEST_CASE("each layer has the window that transformers gives it") {
  const auto windows = [](const std::string& architecture, const std::string& more) {
    const ModelConfig config = parse(fmt::format(
        R"({{"architectures": ["{}ForCausalLM"], "num_hidden_layers": 4, "max_position_embeddings": 64{}}})",
        architecture, more));
    std::vector<std::int64_t> all;
    for (std::int64_t i = 0; i < config.layers; ++i) all.push_back(config.layer(i).window);
    return all;
  };
  using Windows = std::vector<std::int64_t>;
  const Windows none(4, 0);
  CHECK(windows("Llama", R"(, "sliding_window": 8)") == none);
  CHECK(windows("Mistral", R"(, "sliding_window": 8)") == Windows(4, 8));
  CHECK(windows("Mistral", R"(, "sliding_window": 100)") == Windows(4, 100));  // beyond the context, for longer texts
  CHECK(windows("Mistral", R"(, "sliding_window": null)") == none);
  for (const std::string qwen : {"Qwen2", "Qwen3"}) {
    CHECK(windows(qwen, R"(, "sliding_window": 8)") == none);
    CHECK(windows(qwen, R"(, "sliding_window": 8, "use_sliding_window": true)") == none);  // of layers from the 29th on
    CHECK(windows(qwen, R"(, "sliding_window": 8, "use_sliding_window": true, "max_window_layers": 3)") ==
          Windows{0, 0, 0, 8});
    CHECK(windows(qwen, R"(, "use_sliding_window": true, "max_window_layers": 0)") == Windows(4, 4096));
    CHECK(windows(qwen, R"(, "use_sliding_window": true, "max_window_layers": 0, "sliding_window": null)") == none);
    CHECK(windows(qwen, R"(, "sliding_window": 8, "use_sliding_window": true, "max_window_layers": 0,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"])") ==
          Windows{8, 0, 8, 0});
  }
  CHECK(windows("SmolLM3", R"(, "sliding_window": 8)") == none);
  CHECK(windows("SmolLM3", R"(, "sliding_window": 8, "use_sliding_window": true)") == Windows{0, 0, 0, 8});
  CHECK_THROWS_WITH(windows("Qwen2", R"(, "use_sliding_window": true, "layer_types": ["full_attention"])"),
                    Contains("layer_types must be a list of 4 (one for each layer)"));
  CHECK_THROWS_WITH(windows("Qwen2", R"(, "layer_types": ["linear_attention", 1, 1, 1])"),
                    Contains("must hold full_attention and sliding_attention, but is \"linear_attention\""));
  CHECK_THROWS_WITH(windows("Qwen3", R"(, "layer_types": ["sliding_attention", "full_attention", "full_attention",
        "full_attention"])"),
                    Contains("layer_types has sliding_attention, but use_sliding_window is false"));
  CHECK_THROWS_WITH(windows("Mistral", R"(, "sliding_window": 0)"), Contains("must be a positive whole number"));
}

TEST_CASE("Qwen3 and SmolLM3 have the defaults and layers that transformers gives them") {
  const ModelConfig qwen = parse(R"({"architectures": ["Qwen3ForCausalLM"], "attention_bias": true})");
  CHECK(qwen.qk_norm);
  CHECK(qwen.head_dim == 128);
  CHECK(qwen.qkv_bias);
  CHECK(qwen.output_bias);
  CHECK_FALSE(qwen.mlp_bias);
  CHECK_FALSE(qwen.tied_embeddings);
  CHECK(qwen.layer_specs.empty());
  const ModelConfig smol = parse(R"({"model_type": "smollm3"})");
  CHECK_FALSE(smol.qk_norm);
  CHECK(smol.tied_embeddings);
  CHECK(smol.rope.theta == 2e6);
  CHECK(smol.layers == 36);
  CHECK(smol.kv_heads == 4);
  CHECK(smol.eos == std::vector<std::int64_t>{128001});
  const auto rotating = [](const std::string& more) {
    const ModelConfig config = parse(R"({"model_type": "smollm3", "num_hidden_layers": 5)" + more + "}");
    std::string text;
    for (std::int64_t i = 0; i < config.layers; ++i) text += config.layer(i).rotates ? '1' : '0';
    return text;
  };
  CHECK(rotating("") == "11101");
  CHECK(rotating(R"(, "no_rope_layer_interval": 2)") == "10101");
  CHECK(rotating(R"(, "no_rope_layer_interval": 2, "no_rope_layers": [1, 1, 0, 0, 1, 0])") == "11001");
  CHECK_THROWS_WITH(rotating(R"(, "no_rope_layers": [1, 1])"), Contains("must be a list of at least 5"));
  CHECK_THROWS_WITH(rotating(R"(, "no_rope_layers": [1, 1, 2, 1, 1])"), Contains("must hold 0 and 1, but is 2"));
}

TEST_CASE("a config says no window once its windows are gone, and keeps its keys where they are not") {
  for (
      const std::string text :
      {R"({"architectures": ["MistralForCausalLM"], "num_hidden_layers": 3, "sliding_window": 8})",
       R"({"architectures": ["MistralForCausalLM"], "num_hidden_layers": 3})",
       R"({"architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 3, "sliding_window": 8, "use_sliding_window": true,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"]})",
       R"({"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 3, "sliding_window": 8, "use_sliding_window": true,
            "max_window_layers": 1})",
       R"({"architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 3, "sliding_window": 8,
            "use_sliding_window": true, "no_rope_layer_interval": 2})"}) {
    INFO(text);
    ModelConfig config = parse(text);
    REQUIRE(config.longest_window() > 0);
    CHECK((parse(write_config(config, "float32")).layer_specs == config.layer_specs));
    for (LayerSpec& layer : config.layer_specs) layer.window = 0;
    const ModelConfig without = parse(write_config(config, "float32"));
    CHECK(without.longest_window() == 0);
    for (std::int64_t i = 0; i < config.layers; ++i) CHECK(without.layer(i).rotates == config.layer(i).rotates);
  }
}

TEST_CASE("rotary settings are read in the forms of transformers 4 and 5") {
  const RopeConfig four = parse(llama(R"("rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2})")).rope;
  const RopeConfig five =
      parse(llama(R"("rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0})")).rope;
  for (const RopeConfig& rope : {four, five}) {
    CHECK(rope.type == RopeType::linear);
    CHECK(rope.theta == 5e5);
    CHECK(rope.factor == 2);
  }
  const RopeConfig llama31 =
      parse(llama(R"("max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", "factor": 8,
    "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192})"))
          .rope;
  CHECK(llama31.original_context == 8192);
  // Without it, the original context is the whole one; a top-level value wins, as for Phi-3.
  CHECK(parse(llama(R"("rope_scaling": {"rope_type": "yarn", "factor": 2})")).rope.original_context == 2048);
  CHECK(parse(llama(R"("original_max_position_embeddings": 512, "rope_scaling": {"rope_type": "yarn"})")).rope.factor ==
        4);
}

TEST_CASE("a bad setting is named with its rule and value") {
  const auto message = [](const std::string& more) {
    try {
      parse(llama(more));
    } catch (const std::exception& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  CHECK(message(R"("hidden_size": -4)") ==
        "[config] config.json: hidden_size must be a positive whole number, but is -4.");
  CHECK(message(R"("hidden_size": 1e30)") ==
        "[config] config.json: hidden_size must be a positive whole number, but is 1e+30.");
  CHECK(message(R"("hidden_size": "64")") ==
        "[config] config.json: hidden_size must be a positive whole number, but is \"64\".");
  CHECK_THAT(message(R"("num_attention_heads": 6, "hidden_size": 96, "num_key_value_heads": 4)"),
             Contains("must be a multiple of"));
  CHECK_THAT(message(R"("head_dim": 7)"), Contains("head_dim must be even"));
  CHECK_THAT(message(R"("hidden_act": "gelu")"), Contains("hidden_act must be silu"));
  CHECK_THAT(message(R"("rope_theta": 0)"), Contains("rope_theta must be greater than 0"));
  CHECK_THAT(message(R"("rope_scaling": {"type": "linear", "factor": NaN})"), Contains("NaN"));
  CHECK_THAT(message(R"("rope_scaling": {"type": "linear"})"), Contains("rope_scaling.factor is missing"));
  CHECK_THAT(message(R"("rope_scaling": {"type": "spiral"})"), Contains("spiral is not supported"));
  CHECK_THAT(message(R"("rope_scaling": {"type": "longrope", "factor": 2, "short_factor": [1], "long_factor": [1]})"),
             Contains("short_factor must hold 64 numbers (head_dim / 2), but has 1"));
  CHECK_THAT(message(R"("partial_rotary_factor": 0.5)"), Contains("partial_rotary_factor must be 1"));
}

TEST_CASE("a config that is written and read again says the same, and keeps what is not ours") {
  const Json configs = from_text(test::read_file(test::data("tiny-configs.json")));
  for (const auto& [name, json] : configs.items()) {
    Json with_more = json;
    with_more["somebody_elses_key"] = {1, 2, 3};
    const ModelConfig before = parse(to_text(with_more));
    const std::string written = write_config(before, "bfloat16");
    const ModelConfig after = parse(written);
    INFO(name);
    CHECK(write_config(after, "bfloat16") == written);
    CHECK(from_text(written)["somebody_elses_key"] == with_more["somebody_elses_key"]);
    CHECK(from_text(written)["torch_dtype"] == "bfloat16");
    CHECK(after.rope.type == before.rope.type);
    CHECK(after.rope.factor == before.rope.factor);
    CHECK(after.rope.mscale == before.rope.mscale);
    CHECK(after.rope.truncate == before.rope.truncate);
    CHECK(after.rope.beta_fast == before.rope.beta_fast);
    CHECK(after.rope.short_factor == before.rope.short_factor);
    CHECK(after.rope.original_context == before.rope.original_context);
    CHECK(after.context == before.context);
  }
}

}  // namespace config_test
