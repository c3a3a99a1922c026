// Multiple choice by log-likelihood, as lm-evaluation-harness does it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/json.h"
#include "eval/questions.h"
#include "eval/resume.h"
#include "hf/tokenizer.h"
#include "model/prefix_reader.h"

namespace tapetune {

struct ChoiceScore {
  std::string name;
  std::int64_t questions = 0;  // answered
  // Shares of right answers: the choice that is most likely, and the one that is most likely by character.
  double acc = 0, acc_norm = 0;
  // Standard errors, pooled over parts; not a number where a part has a single question.
  double acc_stderr = 0, acc_norm_stderr = 0;
};

struct ChoiceResults {
  ChoiceScore all;
  std::vector<ChoiceScore> groups, parts;
};

// What the model makes of a question's choices.
struct ScoredChoices {
  std::vector<double> log_likelihoods;
  bool shortened = false;  // the question was longer than the model's context
};
void to_json(Json& json, const ScoredChoices& scored);
void from_json(const Json& json, ScoredChoices& scored);

class ChoiceRun {
 public:
  // Model and tokenizer must outlive it.
  ChoiceRun(const Llama& model, const Tokenizer& tokenizer, ChoiceTask task);

  static constexpr std::string_view kind = "choice", unit = "questions";
  using Found = ScoredChoices;
  // Those of the next question, or of one so many behind it; none where there is none.
  std::optional<Found> score(std::int64_t ahead);
  // Enters those of the next one.
  void take(const std::optional<Found>& found);
  std::int64_t total() const { return static_cast<std::int64_t>(task_.questions.size()); }
  std::int64_t done() const { return static_cast<std::int64_t>(likely_.size()); }
  ChoiceResults results() const;  // of the questions so far

  const ChoiceTask& task() const { return task_; }
  // The log-likelihood of each choice, question by question, as far as it goes.
  const std::vector<std::vector<double>>& log_likelihoods() const { return likely_; }
  // Questions that were longer than the model's context and lost their beginning.
  std::int64_t shortened() const { return shortened_; }
  std::int64_t computed() const { return computed_ + (reader_ ? reader_->computed() : 0); }  // tokens, in this process

  Json settings() const;
  double fingerprint() const { return fingerprint_; }
  Json state() const;
  // Fails where it is of other questions, or of a model that computes something else.
  void restore(const Json& state);

 private:
  struct Row {
    TokenIds tokens;
    std::int64_t first;  // token of the choice
    bool shortened;
  };
  std::vector<Row> rows_of(const ChoiceQuestion& question) const;
  ScoredChoices answer(const ChoiceQuestion& question);
  void make_room(std::int64_t tokens);

  const Llama& model_;
  const Tokenizer& tokenizer_;
  ChoiceTask task_;
  std::vector<std::vector<double>> likely_;
  std::optional<PrefixReader> reader_;
  std::int64_t room_ = 0;            // of the reader
  std::optional<std::size_t> held_;  // the part whose header it has read
  std::int64_t computed_ = 0;        // by earlier readers
  std::int64_t shortened_ = 0;
  double fingerprint_;
};

// The choice that is most likely, and the one that is most likely by character; of several the first.
std::pair<std::size_t, std::size_t> chosen(const ChoiceQuestion& question, const std::vector<double>& log_likelihoods);

}  // namespace tapetune
