#include "eval/choice.h"

#include <bit>

#include "core/error.h"
#include "model/loss.h"

namespace tapetune {

namespace {

std::int64_t common_prefix(const TokenIds& a, const TokenIds& b) {
  return std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin();
}

double characters(std::string_view text) {
  return static_cast<double>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }));
}

std::uint64_t hash_of(const ChoiceTask& task) {
  std::uint64_t hash = 0xcbf29ce484222325;
  const auto add = [&](std::string_view text) {
    for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
    hash = (hash ^ 0x100) * 0x100000001b3;  // where it ends
  };
  for (const ChoiceQuestion& question : task.questions) {
    add(task.parts[question.part].header);
    add(question.text);
    for (const std::string& choice : question.choices) add(choice);
  }
  return hash;
}

// Right answers of one part.
struct Tally {
  std::int64_t questions = 0, right = 0, right_norm = 0;
};

ChoiceScore score_of(std::string name, const std::vector<Tally>& parts) {
  ChoiceScore score{std::move(name), 0, 0, 0, 0, 0};
  double right = 0, right_norm = 0, spread = 0, spread_norm = 0;
  const auto squares = [](std::int64_t hits, std::int64_t of) {  // sum of squared differences from the part's mean
    return static_cast<double>(hits) * static_cast<double>(of - hits) / static_cast<double>(of);
  };
  std::int64_t answered = 0;
  for (const Tally& part : parts) {
    if (part.questions == 0) continue;
    ++answered;
    score.questions += part.questions;
    right += static_cast<double>(part.right);
    right_norm += static_cast<double>(part.right_norm);
    spread += squares(part.right, part.questions);
    spread_norm += squares(part.right_norm, part.questions);
  }
  if (score.questions == 0) return score;
  const auto count = static_cast<double>(score.questions), free = static_cast<double>(score.questions - answered);
  score.acc = right / count;
  score.acc_norm = right_norm / count;
  score.acc_stderr = free > 0 ? std::sqrt(spread / free / count) : NAN;
  score.acc_norm_stderr = free > 0 ? std::sqrt(spread_norm / free / count) : NAN;
  return score;
}

}  // namespace

std::pair<std::size_t, std::size_t> chosen(const ChoiceQuestion& question, const std::vector<double>& likely) {
  std::size_t best = 0, best_norm = 0;
  const auto norm = [&](std::size_t i) { return likely[i] / characters(question.choices[i]); };
  for (std::size_t i = 1; i < likely.size(); ++i) {
    if (likely[i] > likely[best]) best = i;
    if (norm(i) > norm(best_norm)) best_norm = i;
  }
  return {best, best_norm};
}

void to_json(Json& json, const ScoredChoices& scored) {
  json = {{"log_likelihoods", scored.log_likelihoods}, {"shortened", scored.shortened}};
}

void from_json(const Json& json, ScoredChoices& scored) { scored = {json.at("log_likelihoods"), json.at("shortened")}; }

ChoiceRun::ChoiceRun(const Llama& model, const Tokenizer& tokenizer, ChoiceTask task)
    : model_(model), tokenizer_(tokenizer), task_(std::move(task)) {
  TokenIds tokens = tokenizer.encode_prompt(task_.questions.at(0).text);
  tokens.resize(std::min<std::size_t>(tokens.size(), 64));
  fingerprint_ = tapetune::fingerprint(model, tokens);
}

// Header, question and a choice each; what is too long for the model loses its beginning.
std::vector<ChoiceRun::Row> ChoiceRun::rows_of(const ChoiceQuestion& question) const {
  const std::int64_t context = model_.config().longest_context();
  const std::string text = task_.parts[question.part].header + question.text;
  const auto asked = static_cast<std::int64_t>(tokenizer_.encode_prompt(text).size());
  std::vector<Row> rows;
  for (const std::string& choice : question.choices) {
    Row row{tokenizer_.encode_prompt(fmt::format("{} {}", text, choice)), asked, false};
    const auto over = static_cast<std::int64_t>(row.tokens.size()) - (context + 1);  // the last is only a target
    if (over > 0) {
      row.tokens.erase(row.tokens.begin(), row.tokens.begin() + over);
      row.first -= over;
      row.shortened = true;
    }
    if (row.first < 1 || row.first >= static_cast<std::int64_t>(row.tokens.size())) {
      fail("eval", "the choice \"{}\" of \"{}\" has no token of its own, or more than the model's context of {}.",
           choice.substr(0, 60), question.text.substr(0, 60), context);
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

void ChoiceRun::make_room(std::int64_t tokens) {
  if (tokens <= room_) return;
  if (reader_) computed_ += reader_->computed();
  room_ = static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(tokens)));
  reader_.emplace(model_, room_);
  held_.reset();
}

ScoredChoices ChoiceRun::answer(const ChoiceQuestion& question) {
  const std::vector<Row> rows = rows_of(question);
  std::int64_t shared = rows[0].first, longest = 0;
  for (const Row& row : rows) {
    shared = std::min({shared, row.first, common_prefix(rows[0].tokens, row.tokens)});
    longest = std::max(longest, static_cast<std::int64_t>(row.tokens.size()) - 1);
  }
  make_room(longest);
  const auto part = [](const Row& row, std::int64_t tokens) {
    return std::span(row.tokens).first(static_cast<std::size_t>(tokens));
  };

  // Three stages with fixed ends, the header, the question and a choice each: so the sums are the same bit for bit
  // whatever was asked before. A header's last token may look different before a question, and is left to that.
  const TokenIds header = tokenizer_.encode_prompt(task_.parts[question.part].header);
  const std::int64_t stem = std::min(common_prefix(header, rows[0].tokens), std::ssize(header) - 1);
  const bool has_header = stem > 0 && stem + 1 == std::ssize(header) && stem < shared;
  if (has_header && held_ != question.part) {
    held_.reset();
    reader_->read(part(rows[0], stem), longest, 0);
    held_ = question.part;
  }
  if (!has_header) held_.reset();
  at::Tensor last;  // [1, hidden], after what all rows share
  if (shared > 0) last = reader_->read(part(rows[0], shared), longest, has_header ? stem : 0).narrow(0, -1, 1);

  std::vector<at::Tensor> states, targets;
  for (const Row& row : rows) {
    const auto read = static_cast<std::int64_t>(row.tokens.size()) - 1;
    at::Tensor own = last;  // from token shared - 1 on
    if (read > shared) {
      own = reader_->read(part(row, read), longest, shared);
      if (last.defined()) own = at::cat({last, own});
    }
    const std::int64_t from = row.first - std::max<std::int64_t>(shared, 1);
    states.push_back(own.narrow(0, from, own.size(0) - from));
    targets.push_back(at::tensor(row.tokens, at::kLong).narrow(0, row.first, read + 1 - row.first));
  }
  const at::Tensor losses = token_losses(model_, at::cat(states), at::cat(targets)).to(at::kCPU, at::kDouble);
  std::vector<double> likely;
  for (std::int64_t begin = 0; const at::Tensor& one : targets) {
    likely.push_back(-losses.narrow(0, begin, one.size(0)).sum().item<double>());
    begin += one.size(0);
    if (!std::isfinite(likely.back())) {
      fail("eval",
           "\"{}\": a log-likelihood is NaN or Inf; the model's weights or its dtype are broken (try --dtype f32).",
           question.text.substr(0, 60));
    }
  }
  const bool shortened = std::any_of(rows.begin(), rows.end(), [](const Row& row) { return row.shortened; });
  return {likely, shortened};
}

std::optional<ScoredChoices> ChoiceRun::score(std::int64_t ahead) {
  const std::int64_t next = done() + ahead;
  if (next >= total()) return {};
  const c10::NoGradGuard evaluation;
  return answer(task_.questions[static_cast<std::size_t>(next)]);
}

void ChoiceRun::take(const std::optional<ScoredChoices>& found) {
  if (!found) return;
  const ChoiceQuestion& question = task_.questions.at(likely_.size());
  if (found->log_likelihoods.size() != question.choices.size()) throw std::out_of_range("choices");
  likely_.push_back(found->log_likelihoods);
  if (found->shortened) ++shortened_;
}

ChoiceResults ChoiceRun::results() const {
  std::vector<Tally> tallies(task_.parts.size());
  for (std::size_t i = 0; i < likely_.size(); ++i) {
    const ChoiceQuestion& question = task_.questions[i];
    const auto [best, best_norm] = chosen(question, likely_[i]);
    Tally& tally = tallies[question.part];
    ++tally.questions;
    tally.right += best == question.answer ? 1 : 0;
    tally.right_norm += best_norm == question.answer ? 1 : 0;
  }
  ChoiceResults results;
  results.all = score_of(task_.name, tallies);
  for (std::size_t i = 0; i < tallies.size(); ++i) {
    results.parts.push_back(score_of(task_.parts[i].name, {tallies[i]}));
  }
  for (const std::string& group : task_.groups) {
    std::vector<Tally> own;
    for (std::size_t i = 0; i < tallies.size(); ++i) {
      if (task_.parts[i].group == group) own.push_back(tallies[i]);
    }
    if (!own.empty()) results.groups.push_back(score_of(group, own));
  }
  return results;
}

Json ChoiceRun::settings() const {
  return {{"task", task_.name},
          {"shots", task_.shots},
          {"questions", total()},
          {"questions_hash", fmt::format("{:016x}", hash_of(task_))}};
}

Json ChoiceRun::state() const {
  return {
      {"settings", settings()}, {"fingerprint", fingerprint_}, {"shortened", shortened_}, {"log_likelihoods", likely_}};
}

void ChoiceRun::restore(const Json& state) {
  const Json before = resume_value<Json>(state, "settings"), now = settings();
  for (const auto& [key, value] : now.items()) {
    if (const Json there = resume_value<Json>(before, key.c_str()); there != value) {
      fail("eval", "the saved results are of other questions: {} was {}, now {}; give --resume another file.", key,
           to_text(there), to_text(value));
    }
  }
  check_fingerprint(resume_value<double>(state, "fingerprint"), fingerprint_);
  const auto shortened = resume_value<std::int64_t>(state, "shortened");
  auto likely = resume_value<std::vector<std::vector<double>>>(state, "log_likelihoods");
  if (likely.size() > task_.questions.size()) fail_damaged();
  for (std::size_t i = 0; i < likely.size(); ++i) {
    if (likely[i].size() != task_.questions[i].choices.size()) fail_damaged();
  }
  likely_ = std::move(likely);
  shortened_ = shortened;
}

}  // namespace tapetune
