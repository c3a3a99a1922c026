// The texts of a comparison, and the contexts that are measured on them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "compare/comparison.h"
#include "compare/eval_file.h"
#include "eval/perplexity.h"
#include "recipe/recipe.h"
#include "run/base.h"

namespace tapetune {

struct EvalText {
  ComparedText about;
  TokenRange range;
  std::string hash;
};

// What to evaluate on, as named: the plan's texts, or those that the recipe trains on. Fails where nothing of one is
// held out.
std::vector<std::string> text_paths(const EvalPlan& plan, const Recipe& recipe);

// All of a file; of one that is trained on, the part that is held out. recipe: with its text packed.
EvalText open_text(const std::string& path, const Recipe& recipe, const BaseModel& base, std::int64_t limit);

// The plan's contexts; by default powers of two times an eighth of the training context, up to twice that context, as
// far as the texts are long enough.
std::vector<std::int64_t> choose_contexts(const EvalPlan& plan, std::int64_t trained,
                                          const std::vector<EvalText>& texts);

}  // namespace tapetune
