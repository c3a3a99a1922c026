#include "adapters/checkpoints.h"

#include "adapters/component.h"

namespace tapetune {

namespace {

std::vector<StoredEncoding> encodings() {
  std::vector<StoredEncoding> all;
  for (const PositionComponent& each : position_components().all()) all.push_back({each.name, each.owns});
  return all;
}

}  // namespace

Checkpoint open_checkpoint(const std::filesystem::path& folder) { return Checkpoint::open(folder, encodings()); }

bool has_position_tensors(const Checkpoint& checkpoint) {
  const PositionComponent* encoding = position_components().get(checkpoint.config().position);
  return encoding != nullptr && encoding->owns != nullptr;
}

void require_known_position(const ModelConfig& config, std::string_view where) {
  require_known_position(config, encodings(), where);
}

}  // namespace tapetune
