// Windows of token files in a shuffled order that is computed, never stored, and can be resumed anywhere.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/json.h"
#include "data/token_file.h"
#include "hf/tokenizer.h"

namespace tapetune {

// A permutation of 0 … n - 1 that a key chooses.
class Permutation {
 public:
  Permutation(std::uint64_t n, std::uint64_t key);
  std::uint64_t operator()(std::uint64_t i) const;

 private:
  std::uint64_t n_;
  int half_bits_;
  std::array<std::uint64_t, 6> round_keys_;
};

struct DataFile {
  TokenFile file;
  std::optional<double> weight;  // given for all files or for none: then each window comes once an epoch
};

enum class HeldOut {
  last,       // the end of each file: no window of a document that is also trained on, but at the border
  scattered,  // over the whole of each file, the same windows with every seed
};

struct BatchSettings {
  std::int64_t context = 0;
  std::uint64_t seed = 0;
  double held_out = 0;  // share of each file's windows
  HeldOut held_out_from = HeldOut::last;
};

// Window i of a file is its tokens [i * context, (i + 1) * context], the last of which is only a target: no target of a
// held-out window is ever one in training.
class Batches {
 public:
  Batches(std::vector<DataFile> files, const BatchSettings& settings);

  // Where a window lies, and how often its file was gone through before.
  struct Place {
    std::size_t file = 0;
    std::int64_t window = 0, epoch = 0;
  };

  std::int64_t context() const { return settings_.context; }
  std::int64_t windows() const;   // to train on, over all files
  std::int64_t held_out() const;  // held out, over all files

  // The window at this place of the endless sequence, which depends on the settings alone: ranks and micro-batches
  // share it by taking their own indices. Safe to call from several threads.
  TokenIds window(std::int64_t index) const;
  Place place(std::int64_t index) const;
  // 0 … held_out() - 1, file by file.
  TokenIds held_out_window(std::int64_t index) const;
  Place held_out_place(std::int64_t index) const;

  // The window at the position, which moves on.
  TokenIds next();
  std::int64_t position() const { return position_; }
  void skip(std::int64_t windows) { position_ += windows; }

  // A few numbers: the position, and what the order depends on.
  Json state() const;
  // BLAKE3 of windows from all over the files: the same size with other tokens gives another.
  std::string sample_hash() const;
  // Fails when the order was another: with other files, context, seed, weights or split.
  void restore(const Json& state);

 private:
  struct Part {
    TokenFile file;
    std::int64_t trained, held_out;
    std::uint64_t weight;
  };
  TokenIds read(const Place& place) const;
  // The n-th window of a part that is drawn, and the n-th of those that are held out.
  Place drawn(std::size_t part, std::uint64_t n) const;
  std::int64_t window_of(const Part& part, std::int64_t n, bool held_out) const;

  BatchSettings settings_;
  std::vector<Part> parts_;
  std::uint64_t total_weight_ = 0;
  std::int64_t position_ = 0;
};

}  // namespace tapetune
