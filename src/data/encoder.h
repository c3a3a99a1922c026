// Token ids of many texts on all cores. Texts are split where the tokenizer splits them anyway, so that a word that
// came before is looked up and not tokenised again.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/split_points.h"
#include "hf/tokenizer.h"

namespace tapetune {

// Bytes without a place to split that are still tokenised: less than 1 GB of memory, see longest_text.
constexpr std::size_t longest_stretch = 3 << 20;

// A document, or a part of one that was split.
struct TextPiece {
  std::string text;
  bool begins = true, ends = true;
};

class TextEncoder {
 public:
  // tokenizer_json: what the tokenizer was made of. threads: 0 for all cores.
  TextEncoder(const Tokenizer& tokenizer, const nlohmann::json& tokenizer_json, int threads);
  ~TextEncoder();
  TextEncoder(const TextEncoder&) = delete;
  TextEncoder& operator=(const TextEncoder&) = delete;

  const SplitPoints& split_points() const { return split_points_; }
  int threads() const { return threads_; }
  // The ids of each piece, without BOS and EOS; pieces of one document follow each other.
  std::vector<std::vector<std::uint32_t>> encode(std::span<const TextPiece> pieces);
  // Parts of the texts so far that were not UTF-8.
  std::size_t invalid() const { return invalid_; }

 private:
  class Distinct;
  class Words;
  struct Task;
  struct Encoded;
  void look_up(Task& task, std::span<const TextPiece> pieces) const;
  void fill_in(Task& task, const Encoded& encoded, std::span<std::vector<std::uint32_t>> ids) const;

  const Tokenizer& tokenizer_;
  SplitPoints split_points_;
  int threads_;
  std::unique_ptr<Words> words_;
  std::size_t invalid_ = 0;
};

}  // namespace tapetune
