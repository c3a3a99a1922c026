#include "model/training.h"

namespace tapetune {

Checkpointing parse_checkpointing(std::string_view word) {
  return word == "full" ? Checkpointing::full : word == "selective" ? Checkpointing::selective : Checkpointing::off;
}

std::uint64_t Training::row_seed(std::int64_t row) const {
  return draw(seed, static_cast<std::uint64_t>(first_sequence + row));
}

}  // namespace tapetune
