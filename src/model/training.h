// What a forward pass knows of the step of training that it belongs to. No tensors.
#pragma once

#include <cstdint>
#include <string_view>

namespace tapetune {

enum class Checkpointing { off, full, selective };
Checkpointing parse_checkpointing(std::string_view word);  // anything else is "off"

// A step of training; its absence means evaluation.
struct Training {
  Checkpointing checkpointing = Checkpointing::off;
  std::uint64_t seed = 0;  // of the step's random draws, so that a recomputed layer draws the same
  bool dropout = true;     // false: gradients that can be compared with other tools'
  // Draws belong to a sequence, so that they depend neither on the micro-batch nor on the number of ranks: row r is
  // sequence first_sequence + r of the step's batch.
  std::int64_t first_sequence = 0;
  std::uint64_t row_seed(std::int64_t row) const;

  // Set by the model. `rows` sequences, of each of which this rank has part number `sequence_rank` of `sequence_size`.
  std::int64_t rows = 1, sequence_rank = 0, sequence_size = 1;
  // The head reads flattened tokens: the input starts at this one of all rows' tokens, and a row has so many.
  std::int64_t flat_begin = 0, flat_length = 0;
};

// A well-mixed number for each (seed, index), in any order (splitmix64).
constexpr std::uint64_t draw(std::uint64_t seed, std::uint64_t index) {
  std::uint64_t x = seed + (index + 1) * 0x9E3779B97F4A7C15U;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
  return x ^ (x >> 31);
}

}  // namespace tapetune
