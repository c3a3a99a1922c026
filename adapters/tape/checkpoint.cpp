#include "adapters/tape/checkpoint.h"

#include "core/error.h"

namespace tapetune {

bool is_position_tensor(std::string_view name) {
  return name.find(".pe.") != std::string_view::npos || name.find(".post_attention_linear.") != std::string_view::npos;
}

bool holds_positions(const StoredTensors& tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const auto& entry) { return is_position_tensor(entry.first); });
}

MethodOptions position_options(const Checkpoint& checkpoint) {
  const std::string where = (checkpoint.path() / "config.json").string();
  const Json config = parse_json(checkpoint.config().json, "tape", where);
  const auto given = config.find("tape");
  std::string mix = "per-head";
  if (given != config.end() && given->is_object() && given->contains("mix") && (*given)["mix"].is_string()) {
    mix = (*given)["mix"].get<std::string>();
  }
  const auto up = checkpoint.stored().find("model.layers.0.pe.up_proj.weight");
  if (up == checkpoint.stored().end() || up->second.entry.shape.empty() ||
      up->second.entry.shape[0] % checkpoint.config().heads != 0) {
    fail("tape", "{}: model.layers.0.pe.up_proj.weight must have a multiple of {} rows (the number of heads).",
         checkpoint.path().string(), checkpoint.config().heads);
  }
  const std::vector<std::string> words{"mix=" + mix,
                                       fmt::format("width={}", up->second.entry.shape[0] / checkpoint.config().heads)};
  return parse_method("tape", words);
}

}  // namespace tapetune
