#include "compare/texts.h"

#include <algorithm>
#include <optional>
#include <span>

#include "core/error.h"
#include "core/log.h"
#include "core/signals.h"
#include "hf/hash.h"
#include "run/run_data.h"

namespace tapetune {

namespace {

namespace fs = std::filesystem;

std::string hash_of_text(const TokenRange& range) {
  constexpr std::int64_t block = 1 << 16;
  Hasher hasher;
  std::vector<std::int64_t> ids(block);
  for (std::int64_t at = 0; at < range.size; at += block) {
    check_interrupted();
    ids.resize(static_cast<std::size_t>(std::min(block, range.size - at)));
    range.file.read(range.begin + at, ids);
    hasher.add(std::as_bytes(std::span(ids)));
  }
  return hasher.hex();
}

}  // namespace

std::vector<std::string> text_paths(const EvalPlan& plan, const Recipe& recipe) {
  std::vector<std::string> paths = plan.data;
  if (paths.empty()) {
    for (const DataSource& source : recipe.data) paths.push_back(source.path);
  }
  for (const std::string& path : paths) {
    if (recipe.held_out > 0 || !find_training_data(recipe, path)) continue;
    fail("compare",
         "{}: all of it is used for training, so nothing is left to evaluate on; set held_out=0.1, or name another "
         "text under data in --eval FILE.",
         path);
  }
  return paths;
}

EvalText open_text(const std::string& path, const Recipe& recipe, const BaseModel& base, std::int64_t limit) {
  const std::optional<TrainingData> source = find_training_data(recipe, path);
  const bool trained_on = source && source->whole;
  const TokenFile file = open_tokens(trained_on ? token_path(recipe, source->index) : fs::path(path),
                                     known_vocabulary(base.tokenizer), base.config);
  EvalText text{{fs::path(path).stem().string(), path, 0, 0, trained_on}, {file, 0, file.size()}, ""};
  if (trained_on) {
    text.range.begin = held_out_begin(file, recipe.held_out, recipe.context);
    text.range.size -= text.range.begin;
    text.about.name += ", held out";
  }
  if (limit > 0) text.range.size = std::min(text.range.size, limit);
  text.about.first_token = text.range.begin;
  text.about.tokens = text.range.size;
  text.hash = hash_of_text(text.range);
  return text;
}

std::vector<std::int64_t> choose_contexts(const EvalPlan& plan, std::int64_t trained,
                                          const std::vector<EvalText>& texts) {
  if (!plan.contexts.empty()) return plan.contexts;
  std::vector<std::int64_t> contexts;
  for (std::int64_t context = std::max<std::int64_t>(2, trained / 8); context <= 2 * trained; context *= 2) {
    const bool fits =
        std::all_of(texts.begin(), texts.end(), [&](const EvalText& t) { return t.range.size > context; });
    if (fits) contexts.push_back(context);
    if (!fits) warn("skipping context {}: a text has fewer tokens", context);
  }
  if (contexts.empty()) {
    fail("compare",
         "{}: {} tokens are too few to evaluate on; raise held_out, or name another text under data in --eval FILE.",
         texts.front().about.path, texts.front().about.tokens);
  }
  return contexts;
}

}  // namespace tapetune
