#include "eval/passkey.h"

#include <random>

#include "core/error.h"
#include "model/sampling.h"

namespace tapetune {

namespace {

constexpr std::string_view task =
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you "
    "about the important information there.";
constexpr std::string_view sentences =
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. ";
constexpr std::string_view question = "What is the pass key? The pass key is";

// numpy's legacy randint(low, high): bits of the Mersenne Twister under the smallest mask that holds the range, drawn
// again while they are beyond it. Where there is no choice nothing is drawn.
std::uint32_t randint(std::mt19937& random, std::uint32_t low, std::uint32_t high) {
  const std::uint32_t range = high - low - 1;
  if (range == 0) return low;
  const std::uint32_t mask = 0xffffffff >> std::countl_zero(range);
  while (true) {
    if (const std::uint32_t drawn = static_cast<std::uint32_t>(random()) & mask; drawn <= range) return low + drawn;
  }
}

std::string garbage_of(std::int64_t characters) {
  std::string text;
  text.reserve(static_cast<std::size_t>(characters) + sentences.size());
  while (static_cast<std::int64_t>(text.size()) < characters) text += sentences;
  text.resize(static_cast<std::size_t>(characters));
  return text;
}

template <typename Value>
bool has_twins(std::vector<Value> values) {
  std::sort(values.begin(), values.end());
  return std::adjacent_find(values.begin(), values.end()) != values.end();
}

void check_options(const PasskeyOptions& options) {
  if (options.trials < 1) fail("eval", "{} trials give no accuracy; give 1 or more.", options.trials);
  if (options.trials - 1 > static_cast<std::int64_t>(0xffffffff - options.seed)) {
    fail("eval", "{} trials starting at seed {} exceed the largest seed, 4294967295; lower one.", options.trials,
         options.seed);
  }
  for (const double depth : options.depths) {
    if (!(depth >= 0 && depth <= 1)) fail("eval", "the depth is {}, but must be 0 to 1.", depth);
  }
  if (has_twins(options.depths)) fail("eval", "a depth is given twice.");
  if (has_twins(options.contexts)) fail("eval", "a context is given twice.");
}

}  // namespace

PasskeyPrompt passkey_prompt(std::int64_t garbage, std::uint32_t seed, std::optional<double> depth) {
  std::mt19937 random(seed);
  const std::int64_t drawn = randint(random, 0, static_cast<std::uint32_t>(garbage));
  const std::int64_t before = depth ? std::llround(*depth * static_cast<double>(garbage)) : drawn;
  const std::string key = std::to_string(randint(random, 1, 50000));
  return {fmt::format("{}\n{}\nThe pass key is {}. Remember it. {} is the pass key.\n{}\n{}", task, garbage_of(before),
                      key, key, garbage_of(garbage - before), question),
          key, before};
}

std::vector<std::int64_t> paper_lengths(std::int64_t interval, std::int64_t max_tokens) {
  std::vector<std::int64_t> lengths;
  for (std::int64_t tokens = interval; interval > 0 && tokens <= max_tokens; tokens += interval) {
    lengths.push_back(static_cast<std::int64_t>(3.75 * static_cast<double>(tokens) / 1024) * 1024);
  }
  if (lengths.empty() || lengths.front() == 0) {
    fail("eval",
         "an interval of {} tokens up to {} gives no prompt: the papers' lengths are whole 1024 characters; give an "
         "interval of 274 or more, or --context.",
         interval, max_tokens);
  }
  return lengths;
}

PasskeyJudge::PasskeyJudge(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {
  const std::string key = "31415";
  TokenIds apart = tokenizer.encode_prompt(question);
  const TokenIds number = tokenizer.encode(key, /*special=*/false);
  apart.insert(apart.end(), number.begin(), number.end());
  by_ids_ = apart == tokenizer.encode_prompt(fmt::format("{} {}", question, key));
}

std::int64_t PasskeyJudge::tokens(const std::string& key) const {
  const std::size_t asked = tokenizer_.encode_prompt(question).size();
  const std::size_t answered = tokenizer_.encode_prompt(fmt::format("{} {}", question, key)).size();
  return std::max<std::int64_t>(1, static_cast<std::int64_t>(answered) - static_cast<std::int64_t>(asked));
}

bool PasskeyJudge::is_correct(const TokenIds& answer, const std::string& key) const {
  if (by_ids_) return answer == tokenizer_.encode(key, /*special=*/false);
  const std::string text = tokenizer_.decode(answer);
  const std::string_view found = std::string_view(text).substr(std::min(text.size(), text.find_first_not_of(" \n\t")));
  return found.starts_with(key) && (found.size() == key.size() || found[key.size()] < '0' || found[key.size()] > '9');
}

namespace {

std::vector<std::optional<double>> depths_of(const PasskeyOptions& options) {
  if (options.depths.empty()) return {std::nullopt};
  return {options.depths.begin(), options.depths.end()};
}

// Of prompts with their answers, in tokens.
struct PromptLengths {
  const PasskeyOptions& options;
  const Tokenizer& tokenizer;
  const PasskeyJudge& judge;

  std::int64_t of(std::int64_t garbage, std::int64_t trial, std::optional<double> depth) const {
    const PasskeyPrompt prompt = passkey_prompt(garbage, options.seed + static_cast<std::uint32_t>(trial), depth);
    return static_cast<std::int64_t>(tokenizer.encode_prompt(prompt.text).size()) + judge.tokens(prompt.key);
  }
  std::int64_t of_first(std::int64_t garbage) const { return of(garbage, 0, depths_of(options).front()); }
  std::int64_t longest(std::int64_t garbage) const {
    std::int64_t most = 0;
    for (const auto& depth : depths_of(options)) {
      for (std::int64_t i = 0; i < options.trials; ++i) most = std::max(most, of(garbage, i, depth));
    }
    return most;
  }
};

void require_room(const PromptLengths& lengths, std::int64_t context) {
  if (const std::int64_t least = lengths.longest(1); least > context) {
    fail("eval",
         "a context of {} is too short: the prompt alone, without filler text, takes {} tokens; give a longer one.",
         context, least);
  }
}

std::int64_t fitting_garbage(const PromptLengths& lengths, std::int64_t context) {
  require_room(lengths, context);
  std::int64_t fits = 1, beyond = 2;
  while (lengths.of_first(beyond) <= context) fits = std::exchange(beyond, beyond * 2);
  while (beyond - fits > 1) {
    const std::int64_t middle = (fits + beyond) / 2;
    (lengths.of_first(middle) <= context ? fits : beyond) = middle;
  }
  // The other trials have numbers and places of their own, which move it by a few tokens.
  for (std::int64_t over = 0; fits > 1 && (over = lengths.longest(fits) - context) > 0;) {
    fits = std::max<std::int64_t>(1, fits - over);
  }
  return fits;
}

double finite_fingerprint(const Llama& model, const Tokenizer& tokenizer) {
  const double found = fingerprint(model, tokenizer.encode_prompt(task));
  require_finite_fingerprint(found);
  return found;
}

}  // namespace

void PasskeyRun::require_fits(const Llama& model, const Tokenizer& tokenizer, const PasskeyOptions& options) {
  check_options(options);
  const PasskeyJudge judge(tokenizer);
  for (const std::int64_t context : options.contexts) require_room({options, tokenizer, judge}, context);
  finite_fingerprint(model, tokenizer);
}

PasskeyRun::PasskeyRun(const Llama& model, const Tokenizer& tokenizer, const PasskeyOptions& options)
    : model_(model), tokenizer_(tokenizer), options_(options), judge_(tokenizer) {
  check_options(options);
  if (options.contexts.empty()) {
    for (const std::int64_t garbage : paper_lengths(options.interval, options.max_tokens)) add_cells(garbage, {});
  }
  const PromptLengths lengths{options_, tokenizer_, judge_};
  for (const std::int64_t context : options.contexts) add_cells(fitting_garbage(lengths, context), context);

  // A prompt shares all before its number with each whose number comes later, whatever their lengths.
  const auto planned = [&](const PasskeyTrial& trial) {
    return model.components().positions->same_length(model.config(), trial.tokens + trial.answer_tokens);
  };
  std::stable_sort(trials_.begin(), trials_.end(), [&](const PasskeyTrial& a, const PasskeyTrial& b) {
    return std::pair(planned(a), a.before) < std::pair(planned(b), b.before);
  });
  fingerprint_ = finite_fingerprint(model, tokenizer);
}

void PasskeyRun::add_cells(std::int64_t garbage, std::optional<std::int64_t> context) {
  for (const auto& depth : depths_of(options_)) {
    check_interrupted();
    PasskeyCell cell{context, garbage, depth, 0, 0, 0, 0};
    for (std::int64_t i = 0; i < options_.trials; ++i) {
      const auto seed = options_.seed + static_cast<std::uint32_t>(i);
      const PasskeyPrompt prompt = passkey_prompt(garbage, seed, depth);
      const auto tokens = static_cast<std::int64_t>(tokenizer_.encode_prompt(prompt.text).size());
      trials_.push_back({cells_.size(), seed, prompt.before, tokens, judge_.tokens(prompt.key), std::nullopt});
      cell.tokens += static_cast<double>(tokens) / static_cast<double>(options_.trials);
      cell.longest = std::max(cell.longest, tokens + trials_.back().answer_tokens);
    }
    capacity_ = std::max(capacity_, cell.longest);
    cells_.push_back(cell);
  }
}

PasskeyPrompt PasskeyRun::prompt(const PasskeyTrial& trial) const {
  const PasskeyCell& cell = cells_[trial.cell];
  return passkey_prompt(cell.garbage, trial.seed, cell.depth);
}

// What the model says next, as many tokens as the answer has.
TokenIds PasskeyRun::continuation(const PasskeyTrial& trial) {
  if (!reader_) reader_.emplace(model_, capacity_);
  const std::vector<std::int64_t>& ends = model_.config().eos;
  Sampler most_likely{SamplingOptions()};
  TokenIds text = tokenizer_.encode_prompt(prompt(trial).text);
  for (std::int64_t i = 0; i < trial.answer_tokens; ++i) {
    const at::Tensor states = reader_->read(text, trial.tokens + trial.answer_tokens);
    text.push_back(most_likely.next(model_.logits(states[-1])));
    if (std::find(ends.begin(), ends.end(), text.back()) != ends.end()) break;
  }
  return {text.begin() + trial.tokens, text.end()};
}

std::optional<TokenIds> PasskeyRun::score(std::int64_t ahead) {
  for (const PasskeyTrial& trial : trials_) {
    if (trial.answer || ahead-- > 0) continue;
    TokenIds answer = continuation(trial);
    read_ += trial.tokens + static_cast<std::int64_t>(answer.size()) - 1;
    return answer;
  }
  return {};
}

void PasskeyRun::take(const std::optional<TokenIds>& found) {
  if (!found) return;
  const auto next = std::find_if(trials_.begin(), trials_.end(), [](const PasskeyTrial& t) { return !t.answer; });
  if (next == trials_.end()) throw std::out_of_range("more than all trials");
  next->answer = found;
}

std::int64_t PasskeyRun::done() const {
  return std::count_if(trials_.begin(), trials_.end(), [](const PasskeyTrial& t) { return t.answer.has_value(); });
}

std::vector<PasskeyCell> PasskeyRun::results() const {
  std::vector<PasskeyCell> results = cells_;
  for (const PasskeyTrial& trial : trials_) {
    if (!trial.answer) continue;
    ++results[trial.cell].trials;
    if (judge_.is_correct(*trial.answer, prompt(trial).key)) ++results[trial.cell].correct;
  }
  return results;
}

std::string PasskeyRun::name(const PasskeyTrial& trial) const {
  const PasskeyCell& cell = cells_[trial.cell];
  return fmt::format("{} characters, depth {}, seed {}", cell.garbage,
                     cell.depth ? fmt::format("{}", *cell.depth) : "drawn", trial.seed);
}

Json PasskeyRun::settings() const {
  Json settings{{"trials", options_.trials}, {"seed", options_.seed}};
  for (const PasskeyCell& cell : cells_) {
    settings["cells"].push_back({cell.garbage, cell.depth ? Json(*cell.depth) : Json()});
  }
  return settings;
}

Json PasskeyRun::state() const {
  Json trials = others_;
  for (const PasskeyTrial& trial : trials_) {
    if (trial.answer) trials.push_back({{"trial", name(trial)}, {"answer", *trial.answer}});
  }
  return {{"fingerprint", fingerprint_}, {"trials", trials}};
}

void PasskeyRun::restore(const Json& state) {
  std::vector<PasskeyTrial> trials = trials_;
  Json others = Json::array();
  for (const Json& one : resume_value<std::vector<Json>>(state, "trials")) {
    const auto saved = resume_value<std::string>(one, "trial");
    auto answer = resume_value<TokenIds>(one, "answer");
    const auto known =
        std::find_if(trials.begin(), trials.end(), [&](const PasskeyTrial& t) { return name(t) == saved; });
    if (known == trials.end()) {
      others.push_back(one);
    } else {
      known->answer = std::move(answer);
    }
  }
  check_fingerprint(resume_value<double>(state, "fingerprint"), fingerprint_);
  trials_ = std::move(trials);
  others_ = std::move(others);
}

}  // namespace tapetune
