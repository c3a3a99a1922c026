#include "cli/options.h"

#include <ATen/Parallel.h>
#include <CLI/CLI.hpp>

#include <charconv>

#include "adapters/checkpoints.h"
#include "adapters/component.h"
#include "adapters/peft.h"
#include "checkpoint/dtype.h"
#include "cli/numbers.h"
#include "core/error.h"
#include "core/log.h"
#include "model/device.h"

namespace tapetune::cli {

void ModelOptions::add_to(CLI::App& verb, bool seeded) {
  verb.add_option("model", folder, "Folder of a Hugging Face checkpoint")->required();
  verb.add_option("--dtype", dtype, "Compute dtype: auto, f32, bf16 or f64 (weights stay as stored)")
      ->check(CLI::IsMember({"auto", "f32", "bf16", "f64"}));
  verb.add_option("--device", device, device_help);
  verb.add_option("--threads", threads, "CPU threads (default: all cores)")->transform(thread_count());
  auto* adapted = verb.add_option("--adapter", adapter, "Folder of an adapter in PEFT's format");
  std::string names;
  for (const Preset& each : presets()) names += fmt::format("{}{}", names.empty() ? "" : ", ", each.name);
  verb.add_option("--method", method, "Freshly initialized method with its settings: " + names)
      ->type_name("NAME [key=value ...]")
      ->excludes(adapted);
  if (!seeded) verb.add_option("--seed", seed, "Seed of the method's initial values");
}

Checkpoint ModelOptions::open() const {
  if (threads > 0) at::set_num_threads(threads);
  return open_checkpoint(folder);
}

AdaptedModel ModelOptions::load(const Checkpoint& checkpoint, bool train_all) const {
  const at::Device where = open_device(device);
  const at::ScalarType arithmetic = dtype == "auto" ? default_dtype(checkpoint, where) : dtype_from_word(dtype).value();
  const LlamaWeights weights = map_weights(checkpoint, where);
  if (method.empty() && adapter.empty()) return open_adapted(checkpoint, weights, arithmetic, train_all);
  std::optional<MethodOptions> fresh;
  if (!method.empty()) fresh = parse_method(method.front(), std::vector<std::string>(method.begin() + 1, method.end()));
  // Its own encoding may be given again, with other settings; "none" leaves it out.
  const std::string& own = checkpoint.config().position;
  const bool positions = has_position_tensors(checkpoint);
  if (positions && (!fresh || (fresh->positions.type != own && fresh->preset != "none"))) {
    fail("adapter", "{}: has {}'s position tensors, which do not combine with another method or adapter; drop {}.",
         folder, position_components().find(own).title, adapter.empty() ? "--method" : "--adapter");
  }
  if (!fresh) return load_adapter(checkpoint.config(), weights, adapter, arithmetic);
  if (positions && fresh->positions.type == base_positions) {
    fresh->positions = {std::string(default_positions), Json::object()};
  }
  AdaptedModel adapted = adapt(checkpoint.config(), weights, *fresh, arithmetic, seed);
  if (positions && fresh->positions.type == own) restore_parameters(adapted, weights, folder);
  return adapted;
}

RecipeWords split_words(const std::vector<std::string>& words) {
  RecipeWords split;
  for (const std::string& word : words) {
    const bool setting = word.find('=') != std::string::npos && !std::filesystem::exists(word);
    (setting ? split.settings : split.recipes).push_back(word);
  }
  return split;
}

std::vector<std::int64_t> parse_tokens(std::string_view text, std::string_view where) {
  std::vector<std::int64_t> tokens;
  const auto separator = [](char c) { return c == ',' || c == ' ' || c == '\n' || c == '\t' || c == '\r'; };
  const char* at = text.data();
  const char* const end = text.data() + text.size();
  while (true) {
    while (at != end && separator(*at)) ++at;
    if (at == end) break;
    std::int64_t value = 0;
    const auto [rest, error] = std::from_chars(at, end, value);
    if (error != std::errc() || (rest != end && !separator(*rest))) {
      const char* stop = std::find_if(at, end, separator);
      fail("tokens", "{}: \"{}\" is not a token id; give whole numbers, for example 1,2,3.", where,
           std::string_view(at, stop));
    }
    tokens.push_back(value);
    at = rest;
  }
  if (tokens.empty()) fail("tokens", "{}: no tokens; give ids, for example 1,2,3.", where);
  return tokens;
}

}  // namespace tapetune::cli
