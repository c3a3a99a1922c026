// What a user may set about a method: one table of keys for the command line, the adapter's files and recipes.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/config.h"
#include "core/json.h"
#include "model/components.h"

namespace tapetune {

enum class Mix { full, per_head };

struct MethodOptions {
  std::string method = "none";

  // LoRA matrices beside projections. Rank 0: none.
  std::int64_t rank = 8;
  double alpha = 16.0;
  double dropout = 0.0;
  std::vector<Projection> targets{Projection::q, Projection::k, Projection::v, Projection::o};
  std::vector<std::int64_t> layers;   // layers_to_transform: those with LoRA matrices; empty: all
  std::vector<std::string> excluded;  // exclude_modules: names, or their ends, of projections without them
  bool rslora = false;
  bool dora = false;

  // Shifted groups: a share of the sequence, or tokens where it is above 1.
  double group = 0.25;

  // Contextual positions.
  Mix mix = Mix::full;
  std::int64_t width = 4;  // I = width * heads
  bool random_offset = false;
  bool equivariant = true;  // false: the ablation, with matrices of their own for the sines

  // RoPE settings; what is not given stays as in the model's config.
  std::optional<RopeType> scaling;
  std::optional<double> factor;
  std::optional<double> theta;

  // Other trainable parameters.
  bool train_embeddings = false, train_norms = false, train_head = false;
  bool untie = false;
};

struct MethodKey {
  std::string_view name;
  std::string_view help;
  void (*set)(MethodOptions& options, std::string_view text);
  Json (*get)(const MethodOptions& options);
};

std::span<const MethodKey> method_keys();

std::string_view projection_name(Projection which);  // "q", …, "lm_head"

// A method's defaults, then "key=value" overrides. Fails on an unknown method, a key that the method does not have and
// a value that the key cannot take, each with what would be right.
MethodOptions parse_method(std::string_view method, std::span<const std::string> overrides);

// A method with all its settings, and back.
Json method_json(const MethodOptions& options);
MethodOptions method_from_json(const Json& json, std::string_view where);

}  // namespace tapetune
