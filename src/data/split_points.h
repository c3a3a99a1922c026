// Where a text can be split so that its parts, tokenised alone, give the ids of the whole.
#pragma once

#include <nlohmann/json.hpp>

#include <array>
#include <cstddef>
#include <string_view>
#include <vector>

namespace tapetune {

// Split points are before a space or a line end. Two families of tokenizers are known to split there, each time proved
// from what its tokenizer.json says; for all others there are no split points:
// - byte-level BPE with the regular expression of GPT-2, Llama 3 or Qwen 2: none of its matches goes on from a
//   printable character into a space, nor from a letter or digit into a line end. Nor does one cross the end of the
//   last line before a paragraph (Llama 3 and Qwen 2), or a single line end between printable characters (GPT-2), which
//   is where long texts without spaces, as Chinese ones, are split into pieces;
// - BPE over whole texts with "▁" for spaces (Llama 1 and 2, Mistral): a merge makes a piece of the vocabulary, so that
//   no merge crosses two characters that stand side by side in no piece.
class SplitPoints {
 public:
  explicit SplitPoints(const nlohmann::json& tokenizer);

  bool any() const { return any_; }
  void disable() { any_ = false; }
  // The first place to split at or after `from`, or npos. There is always a character before it and two after it.
  std::size_t next(std::string_view text, std::size_t from) const;
  // The same for pieces of long texts, which may also begin after a line end. The last `undecided` bytes of a text are
  // judged only when more of it is there.
  std::size_t next_piece(std::string_view text, std::size_t from) const;
  static constexpr std::size_t undecided = 64;

  // What to tokenise for a part that begins at a split point, and whether its first token is none of the text's.
  struct Part {
    std::string_view text;
    bool drop_first = false;
  };
  Part continued(std::string_view part) const;

 private:
  enum class AfterLine { never, lone, last };  // after a line end that has no white space around it; after the last one
  void byte_level(AfterLine after_line);
  void sentence_pieces(const nlohmann::json& model);
  bool allowed(std::string_view text, std::size_t at) const;
  bool allowed_after_line(std::string_view text, std::size_t at) const;

  bool any_ = false;
  AfterLine after_line_ = AfterLine::never;
  bool drops_space_ = false;                              // the tokenizer puts one before every text
  bool drops_prefix_ = false;                             // and also before a text that begins with a line end
  bool carriages_ = false;                                // a \r is a line end too
  bool wide_lines_ = false;                               // line ends may be split points after characters beyond ASCII
  std::array<bool, 128> before_space_{}, before_line_{};  // may the character stand before the split point?
  std::vector<char32_t> never_before_space_, never_before_line_;  // of those beyond ASCII, sorted
  std::array<bool, 256> begins_added_{}, ends_added_{};           // first and last bytes of added tokens
};

}  // namespace tapetune
