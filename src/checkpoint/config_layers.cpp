// In what layers differ, in config.json: windows, and which rotate.
#include <algorithm>

#include "checkpoint/config_reader.h"

namespace tapetune {

namespace {

// The width of the windows that config.json gives to some layers; 0: to none.
std::int64_t read_window(const Json& root, const ConfigReader& reader, Architecture architecture) {
  const bool has_windows = architecture == Architecture::mistral || reader.boolean("use_sliding_window", false);
  const bool null = root.contains("sliding_window") && root["sliding_window"].is_null();
  if (!has_windows || null) return 0;
  return reader.positive("sliding_window", architecture == Architecture::smollm3 ? 0 : 4096);
}

// Which layers have a window: those that layer_types names, else what transformers takes from older keys.
std::vector<bool> read_windowed(const ConfigReader& reader, const ModelConfig& config, std::int64_t window) {
  if (config.architecture == Architecture::mistral) return std::vector<bool>(config.layer_specs.size(), true);
  std::vector<bool> windowed(config.layer_specs.size(), false);
  const std::vector<Json> types = reader.by_layer("layer_types", config.layers);
  const bool qwen = config.architecture != Architecture::smollm3;
  const std::int64_t first = qwen ? reader.count("max_window_layers", 28) : 0;
  for (std::int64_t i = 0; i < config.layers; ++i) {
    const auto at = static_cast<std::size_t>(i);
    if (!types.empty()) {
      windowed[at] = types[at] == "sliding_attention";
      if (!windowed[at] && types[at] != "full_attention") {
        reader.bad("layer_types", "must hold full_attention and sliding_attention", types[at]);
      }
      if (windowed[at] && window == 0) {
        fail("config",
             "{}: layer_types has sliding_attention, but use_sliding_window is false or sliding_window is missing; set "
             "both, or make all of layer_types full_attention.",
             reader.where());
      }
    } else {
      windowed[at] = qwen ? i >= first : !config.layer(i).rotates;
    }
  }
  return windowed;
}

}  // namespace

void read_layers(const Json& root, const ConfigReader& reader, bool own_architecture, ModelConfig& config) {
  if (config.architecture == Architecture::llama && !own_architecture) return;  // whose layers are all alike
  constexpr std::int64_t most = 1 << 16;  // a damaged config must not fill the memory
  if (config.layers > most) reader.bad("num_hidden_layers", "must be at most 65536", Json(config.layers));
  const auto layers = static_cast<std::size_t>(config.layers);
  config.layer_specs.resize(layers);
  std::vector<Json> rotate;
  if (config.architecture == Architecture::smollm3) {
    rotate = reader.by_layer("no_rope_layers", config.layers, /*may_be_longer=*/true);  // 1: the layer does rotate
    const std::int64_t interval = reader.positive("no_rope_layer_interval", 4);
    for (std::int64_t i = 0; rotate.empty() && i < config.layers; ++i) {
      config.layer_specs[static_cast<std::size_t>(i)].rotates = (i + 1) % interval != 0;
    }
  }
  if (own_architecture) rotate = reader.by_layer("rotary_layers", config.layers);
  for (std::size_t i = 0; i < std::min(rotate.size(), layers); ++i) {
    if (rotate[i] != Json(0) && rotate[i] != Json(1)) {
      reader.bad(own_architecture ? "rotary_layers" : "no_rope_layers", "must hold 0 and 1", rotate[i]);
    }
    config.layer_specs[i].rotates = rotate[i] == Json(1);
  }
  if (own_architecture) {
    const std::vector<Json> windows = reader.by_layer("attention_windows", config.layers);
    for (std::size_t i = 0; i < windows.size(); ++i) {
      if (!windows[i].is_number_unsigned()) reader.bad("attention_windows", "must hold whole numbers", windows[i]);
      config.layer_specs[i].window = windows[i].get<std::int64_t>();
    }
  } else {
    const std::int64_t window = read_window(root, reader, config.architecture);
    const std::vector<bool> windowed = read_windowed(reader, config, window);
    for (std::size_t i = 0; i < layers; ++i) config.layer_specs[i].window = windowed[i] ? window : 0;
  }
  const bool alike = std::ranges::all_of(config.layer_specs, [](const LayerSpec& spec) { return spec == LayerSpec(); });
  if (alike) config.layer_specs.clear();
}

// The window keys as they were; all that may have changed is that there is no window any more.
void write_layers(Json& root, const ModelConfig& config) {
  const bool windows = config.longest_window() > 0;
  if (config.architecture == Architecture::mistral) {
    root["sliding_window"] = windows ? Json(config.longest_window()) : Json();
  } else if (!windows && root.contains("use_sliding_window") && root["use_sliding_window"] == true) {
    root["use_sliding_window"] = false;
    root.erase("layer_types");  // which follow from that
  }
  const bool stated = root.contains("no_rope_layers") && !root["no_rope_layers"].is_null();
  if (config.architecture != Architecture::smollm3 || stated) return;
  root["no_rope_layers"] = Json::array();
  for (std::int64_t i = 0; i < config.layers; ++i) root["no_rope_layers"].push_back(config.layer(i).rotates ? 1 : 0);
}

}  // namespace tapetune
