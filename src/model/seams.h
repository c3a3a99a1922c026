// The four places where a method may act on a plain Llama: linear, rotary, attention, position. Each has the plain
// choice as its default; a method derives from those that it changes, so that methods which change different ones
// combine.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "checkpoint/config.h"
#include "kernels/attention.h"
#include "model/linear.h"

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

// linear: what comes out of frozen projections, with what is added to them.
class LinearSeam {
 public:
  virtual ~LinearSeam() = default;
  struct Call {
    std::int64_t layer;                 // the number of layers for the head
    std::span<const Projection> which;  // they read the same input
    std::span<const Linear> frozen;
    const Training* training;  // null in evaluation
    bool gradients_only;       // only gradients will be asked for, not the values
  };
  virtual std::vector<at::Tensor> project(const Call& call, const at::Tensor& x) const;
  // What trains at this layer, for the backward of a recomputed one.
  virtual std::vector<at::Tensor> trained(std::int64_t layer) const;
};

// rotary: the position state that the first layer sees.
class RotarySeam {
 public:
  virtual ~RotarySeam() = default;
  virtual at::Tensor start(const ModelConfig& config, const at::Tensor& positions, std::int64_t planned_length,
                           at::ScalarType dtype,
                           const Training* training) const;  // [B|1, N] -> [B|1, N, C, D]: cos, then sin
};

// attention: who sees whom.
class AttentionSeam {
 public:
  virtual ~AttentionSeam() = default;
  virtual kernels::Cuts cuts(const ModelConfig& config, std::int64_t length, const Training* training) const;
};

// position: how the position state changes on its way to the next layer.
class PositionSeam {
 public:
  virtual ~PositionSeam() = default;
  // Whether any layer does. If so, the state has a channel for every key/value head, and caches keep it.
  virtual bool updates() const;
  virtual bool updates(std::int64_t layer) const;
  // attended: the state under the layer's attention weights, [B, N, H, D]; mlp_output: [B, N, hidden].
  virtual at::Tensor update(std::int64_t layer, const at::Tensor& position, const at::Tensor& attended,
                            const at::Tensor& mlp_output) const;
  virtual std::vector<at::Tensor> trained(std::int64_t layer) const;
};

struct Seams {
  std::shared_ptr<const LinearSeam> linear = std::make_shared<LinearSeam>();
  std::shared_ptr<const RotarySeam> rotary = std::make_shared<RotarySeam>();
  std::shared_ptr<const AttentionSeam> attention = std::make_shared<AttentionSeam>();
  std::shared_ptr<const PositionSeam> position = std::make_shared<PositionSeam>();
};

}  // namespace tapetune
