// Whether recipes that are compared scale their positions alike. Where they do not, a lower perplexity may come from
// the scaling (YaRN against linear interpolation) and not from the method.
#pragma once

#include <string>
#include <vector>

#include "compare/compare.h"

namespace tapetune {

// Whether another rope_theta is what the method is (theta-scaling), so that an equal one would take it away.
bool theta_is_method(const Recipe& recipe);
// Whether theta is moreover all that it changes in the positions, so that scaling them would make another method of it.
bool positions_are_method(const Recipe& recipe, const RopeConfig& base);

// One group for each distinct position scaling and theta, without recipes whose positions are their method; `base` is
// the base model's. A recipe whose theta is its method is grouped by its scaling alone.
std::vector<PositionGroup> position_groups(const std::vector<NamedRecipe>& recipes, const RopeConfig& base);

// The recipe with the lowest perplexity of those whose positions can be given to others.
const NamedRecipe& best_positions(const std::vector<NamedRecipe>& recipes, const Comparison& result);

// The command that compares the recipes of these groups, all with the positions of `like`, which is one of them, in
// folders beside `options.out`; three lines for a shell. Where thetas differ too, it leaves out theta-scaling.
std::string equal_positions_command(const std::vector<NamedRecipe>& recipes, const NamedRecipe& like,
                                    const RopeConfig& base, const CompareOptions& options);

}  // namespace tapetune
