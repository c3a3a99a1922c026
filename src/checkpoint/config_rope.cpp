// Rotary settings in config.json.
#include <algorithm>
#include <array>

#include "checkpoint/config_reader.h"

namespace tapetune {

namespace {

constexpr std::array<std::string_view, 6> rope_types{"default", "linear", "dynamic", "yarn", "llama3", "longrope"};

}  // namespace

std::string_view rope_type_name(RopeType type) { return rope_types[static_cast<std::size_t>(type)]; }

RopeConfig read_rope(const Json& root, std::string_view where, std::int64_t context, std::int64_t head_dim,
                     double default_theta) {
  // transformers 4 has rope_scaling beside rope_theta, transformers 5 one rope_parameters; the former wins.
  const ConfigReader top(root, where, "");
  const char* name =
      top.find("rope_scaling") != nullptr && !top.find("rope_scaling")->empty() ? "rope_scaling" : "rope_parameters";
  const Json* object = top.find(name);
  const Json nothing = Json::object();
  if (object != nullptr && !object->is_object()) top.bad(name, "must be an object", *object);
  const ConfigReader reader(object != nullptr ? *object : nothing, where, std::string(name) + ".");

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
  rope.theta = reader.positive_number("rope_theta", top.positive_number("rope_theta", default_theta));
  for (const ConfigReader* place : {&top, &reader}) {
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

std::string rope_scaling_text(const RopeConfig& rope) { return to_text(rope_scaling_json(rope)); }

}  // namespace tapetune
