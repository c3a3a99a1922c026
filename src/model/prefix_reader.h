// Texts that begin alike, read one after another: few-shot headers, one question with several answers, a prompt that
// grows token by token.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "model/llama.h"

namespace tapetune {

class PrefixReader {
 public:
  // The model must outlive it. No text may be longer than the capacity.
  PrefixReader(const Llama& model, std::int64_t capacity);

  // The states after the text's last tokens: of those that its beginning does not share with the text read before, and
  // of the last one in any case. `keep`: no more than so many tokens are taken from there. What a state sums up in
  // which order depends on where reading began; a caller that wants bits to be the same chooses that by `keep`.
  // planned_length: of the text with all that may follow, for rotary variants that depend on it.
  at::Tensor read(std::span<const std::int64_t> tokens, std::int64_t planned_length,
                  std::int64_t keep = std::numeric_limits<std::int64_t>::max());  // [n, hidden]

  std::int64_t computed() const { return computed_; }  // tokens that went through the model so far

 private:
  const Llama& model_;
  SequenceCache cache_;
  std::vector<std::int64_t> text_;  // what the cache holds
  std::int64_t rotary_length_ = 0;  // with these frequencies
  std::int64_t computed_ = 0;
};

}  // namespace tapetune
