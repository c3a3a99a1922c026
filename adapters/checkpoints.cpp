#include "adapters/checkpoints.h"

#include "adapters/tape/checkpoint.h"

namespace tapetune {

namespace {

std::span<const StoredEncoding> encodings() { return {&stored_tape, 1}; }

}  // namespace

Checkpoint open_checkpoint(const std::filesystem::path& folder) { return Checkpoint::open(folder, encodings()); }

bool has_position_tensors(const Checkpoint& checkpoint) {
  return std::ranges::any_of(encodings(),
                             [&](const StoredEncoding& each) { return each.type == checkpoint.config().position; });
}

void require_known_position(const ModelConfig& config, std::string_view where) {
  require_known_position(config, encodings(), where);
}

}  // namespace tapetune
