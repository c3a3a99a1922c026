// Pass-key retrieval as in LongLoRA's and TAPE's tables: a number hidden in repeated sentences is asked for at the end.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/json.h"
#include "eval/resume.h"
#include "hf/tokenizer.h"
#include "model/prefix_reader.h"

namespace tapetune {

struct PasskeyPrompt {
  std::string text, key;
  std::int64_t before = 0;  // characters of garbage before the number
};

// The papers' prompt with so many characters of garbage, character for character what their scripts draw with numpy and
// this seed. depth: the share of the garbage that comes first, instead of the place drawn; the number stays the same.
PasskeyPrompt passkey_prompt(std::int64_t garbage, std::uint32_t seed, std::optional<double> depth = std::nullopt);

// The papers' lengths in characters, one for every `interval` tokens up to `max_tokens`.
std::vector<std::int64_t> paper_lengths(std::int64_t interval, std::int64_t max_tokens);

// Compares answers: as token ids, which the papers do, where the tokenizer is like Llama 2's, whose tokens for a number
// are the same alone and behind a text; as text with others.
class PasskeyJudge {
 public:
  explicit PasskeyJudge(const Tokenizer& tokenizer);  // which must outlive it

  bool by_ids() const { return by_ids_; }
  std::int64_t tokens(const std::string& key) const;  // of the answer
  bool is_correct(const TokenIds& answer, const std::string& key) const;

 private:
  const Tokenizer& tokenizer_;
  bool by_ids_;
};

struct PasskeyOptions {
  // As much garbage as leaves prompt and answer of every trial within so many tokens; empty: the papers' lengths.
  std::vector<std::int64_t> contexts;
  std::int64_t interval = 1000, max_tokens = 8192;  // of the papers' lengths
  std::vector<double> depths;                       // empty: places are drawn, as in the papers
  std::int64_t trials = 10;
  std::uint32_t seed = 0;  // of the first trial; the next ones count on
};

struct PasskeyCell {
  std::optional<std::int64_t> context;  // asked for
  std::int64_t garbage = 0;             // characters
  std::optional<double> depth;
  double tokens = 0;         // of a prompt, the mean
  std::int64_t longest = 0;  // prompt with answer
  std::int64_t trials = 0, correct = 0;
};

struct PasskeyTrial {
  std::size_t cell;  // among the results
  std::uint32_t seed;
  std::int64_t before, tokens, answer_tokens;  // characters before the number; tokens of the prompt, and of the answer
  std::optional<TokenIds> answer;              // once the model gave one
};

class PasskeyRun {
 public:
  // Fails where a setting allows no prompt, or the model computes NaN or Inf.
  static void require_fits(const Llama& model, const Tokenizer& tokenizer, const PasskeyOptions& options);
  // Model and tokenizer must outlive it. Fails as require_fits does.
  PasskeyRun(const Llama& model, const Tokenizer& tokenizer, const PasskeyOptions& options);

  static constexpr std::string_view kind = "passkey", unit = "trials";
  using Found = TokenIds;
  // The answer to the next trial, or to one so many behind it; none where there is none.
  std::optional<Found> score(std::int64_t ahead);
  // Enters that to the next one.
  void take(const std::optional<Found>& found);
  std::int64_t total() const { return static_cast<std::int64_t>(trials_.size()); }
  std::int64_t done() const;
  std::vector<PasskeyCell> results() const;  // by length, then depth; of the trials so far
  const std::vector<PasskeyTrial>& trials() const { return trials_; }
  PasskeyPrompt prompt(const PasskeyTrial& trial) const;
  const PasskeyJudge& judge() const { return judge_; }

  std::int64_t read() const { return read_; }  // tokens of prompts and answers in this process
  std::int64_t computed() const { return reader_ ? reader_->computed() : 0; }  // of these, not shared with another

  Json settings() const;
  double fingerprint() const { return fingerprint_; }
  // The answers so far. The next run may ask for others; nothing is forgotten.
  Json state() const;
  // Fails where they are of a model that computes something else.
  void restore(const Json& state);

 private:
  void add_cells(std::int64_t garbage, std::optional<std::int64_t> context);
  TokenIds continuation(const PasskeyTrial& trial);
  std::string name(const PasskeyTrial& trial) const;

  const Llama& model_;
  const Tokenizer& tokenizer_;
  PasskeyOptions options_;
  PasskeyJudge judge_;
  std::vector<PasskeyCell> cells_;
  std::vector<PasskeyTrial> trials_;  // in the order that shares most
  std::optional<PrefixReader> reader_;
  std::int64_t capacity_ = 0, read_ = 0;
  double fingerprint_;
  Json others_ = Json::array();  // saved answers that are not asked for now
};

}  // namespace tapetune
