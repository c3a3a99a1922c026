#include "compare/measure.h"

#include <algorithm>
#include <numeric>

#include "compare/output.h"
#include "core/error.h"
#include "core/signals.h"
#include "eval/passkey.h"
#include "hf/tokenizer.h"

namespace tapetune {

namespace {

constexpr std::int64_t most_looked_at = 512, most_pictured = 28;  // tokens of a text, and of these in a matrix

std::string file_name(std::string_view words) {
  std::string name(words);
  for (char& c : name) c = c == '/' || c == ' ' ? '-' : c;
  return name;
}

PerplexityOptions perplexity_options(const EvalPlan& plan, std::vector<std::int64_t> contexts) {
  PerplexityOptions options;
  options.protocol = plan.protocol;
  options.stride = plan.stride;
  options.contexts = std::move(contexts);
  return options;
}

// Where the plan names no contexts for it, those of perplexity.
PasskeyOptions passkey_options(const PasskeyPlan& plan, const std::vector<std::int64_t>& otherwise) {
  PasskeyOptions options;
  options.contexts = plan.contexts.empty() ? otherwise : plan.contexts;
  options.trials = plan.trials;
  options.seed = static_cast<std::uint32_t>(plan.seed);
  // Evenly from the beginning to the end; a single depth is in the middle.
  for (std::int64_t i = 0; i < plan.depths; ++i) {
    options.depths.push_back(plan.depths == 1 ? 0.5 : static_cast<double>(i) / static_cast<double>(plan.depths - 1));
  }
  return options;
}

RetrievalCell retrieval_cell(const PasskeyCell& cell) {
  const double accuracy = static_cast<double>(cell.correct) / static_cast<double>(cell.trials);
  return {*cell.context, *cell.depth, cell.trials, cell.correct, accuracy};
}

std::int64_t count_parameters(const AdaptedModel& adapted) {
  std::int64_t count = 0;
  for (const Parameter& p : adapted.parameters) count += p.value.numel();
  return count;
}

}  // namespace

void require_measurable(const EvalPlan& plan, const EvalData& data, const Llama& model) {
  for (const EvalText& text : data.texts)
    PerplexityRun::require_fits(text.range, perplexity_options(plan, data.contexts));
  if (!plan.passkey) return;
  if (!known_vocabulary(data.tokenizer)) {
    fail("compare",
         "the base model has no tokenizer, which passkey retrieval needs; remove passkey from the --eval file.");
  }
  PasskeyRun::require_fits(model, Tokenizer::open(data.tokenizer), passkey_options(*plan.passkey, data.contexts));
}

Measurements::Measurements(const EvalPlan& plan, const EvalData& data, std::string version,
                           const std::filesystem::path& cache, World& world)
    : plan_(plan), data_(data), version_(std::move(version)), world_(world), cache_(cache, world) {
  const TokenRange& range = data.texts.front().range;
  tokens_.resize(static_cast<std::size_t>(std::min({range.size, most_looked_at, data.contexts.back()})));
  range.file.read(range.begin, tokens_);
  // Neighbours: rotary states turn so fast that tokens picked far apart would show aliasing.
  pictured_.resize(std::min<std::size_t>(most_pictured, tokens_.size()));
  std::iota(pictured_.begin(), pictured_.end(), 0);
}

void Measurements::measure(EvalTarget& target, Entry& entry) const {
  const ModelSize found = size(target);
  entry.context = found.context;
  entry.cost.trained_parameters = found.trained_parameters;
  for (std::size_t text = 0; text < data_.texts.size(); ++text) {
    std::vector<ContextPerplexity>& rows = entry.perplexity.emplace_back();
    for (std::size_t i = 0; i < data_.contexts.size(); ++i) rows.push_back(perplexity(target, text, i));
  }
  entry.layers = layers(target);
  entry.positions_change = target.positions_change();
  if (plan_.passkey) entry.passkey = passkey(target);
}

EvaluationKey Measurements::key(const EvalTarget& target, const std::string& what) const {
  return {fmt::format("{}.{}", file_name(target.name()), what), target.identity(version_)};
}

ModelSize Measurements::size(EvalTarget& target) const {
  EvaluationKey cached = key(target, "size");
  cached.depends_on["trained_context"] = target.trained_context();
  return cache_.get<ModelSize>(cached, [&]() -> ModelSize {
    const AdaptedModel& adapted = target.model();
    return {adapted.model.config().longest_context(), count_parameters(adapted)};
  });
}

ContextPerplexity Measurements::perplexity(EvalTarget& target, std::size_t text, std::size_t context_index) const {
  const std::int64_t context = data_.contexts[context_index];
  const PerplexityOptions options = perplexity_options(plan_, {context});
  EvaluationKey cached = key(target, fmt::format("text-{}.{}", text + 1, context));
  cached.depends_on["text"] = data_.texts[text].hash;
  cached.depends_on["protocol"] = protocol_name(options.protocol);
  cached.depends_on["stride"] = options.stride;
  cached.depends_on["context"] = context;
  const auto scores = cache_.get<ContextPerplexity>(cached, [&] {
    check_interrupted();
    say_progress("[compare] {}: perplexity at {} tokens (context {} of {})", target.name(), context, context_index + 1,
                 data_.contexts.size());
    PerplexityRun run(target.model().model, data_.texts[text].range, options);
    const ResumeFile resume_file{cache_.sums(cached), target.name(), &world_};
    resume(run, resume_file);
    return finish(run, resume_file).at(0);
  });
  cache_.remove_sums(cached);
  return scores;
}

std::vector<LayerPicture> Measurements::layers(EvalTarget& target) const {
  EvaluationKey cached = key(target, "layers");
  cached.depends_on["tokens"] = tokens_;
  cached.depends_on["places"] = pictured_;
  return cache_.get<std::vector<LayerPicture>>(cached, [&] {
    check_interrupted();
    return picture_layers(target.model().model, tokens_, pictured_);
  });
}

std::vector<RetrievalCell> Measurements::passkey(EvalTarget& target) const {
  const PasskeyPlan& plan = *plan_.passkey;
  const PasskeyOptions options = passkey_options(plan, data_.contexts);
  EvaluationKey cached = key(target, "passkey");
  cached.depends_on["passkey"] = {
      {"contexts", options.contexts}, {"depths", plan.depths}, {"trials", plan.trials}, {"seed", plan.seed}};
  auto cells = cache_.get<std::vector<RetrievalCell>>(cached, [&] {
    check_interrupted();
    say_progress("[compare] {}: passkey", target.name());
    const Tokenizer tokenizer = Tokenizer::open(data_.tokenizer);
    PasskeyRun run(target.model().model, tokenizer, options);
    const ResumeFile resume_file{cache_.sums(cached), target.name(), &world_};
    resume(run, resume_file);
    std::vector<RetrievalCell> found;
    for (const PasskeyCell& cell : finish(run, resume_file)) found.push_back(retrieval_cell(cell));
    return found;
  });
  cache_.remove_sums(cached);
  return cells;
}

}  // namespace tapetune
