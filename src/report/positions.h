// Whether recipes that are compared scale their positions alike. Where they do not, a lower perplexity may come from
// the scaling (YaRN against linear interpolation) and not from the method.
#pragma once

#include <string>
#include <vector>

#include "report/compare.h"

namespace tapetune {

// Whether other positions are what the method is (theta-scaling), so that equal ones would take it away.
bool positions_are_method(const Recipe& recipe);

// One group for each distinct position scaling, in the order of the recipes, without those whose positions are their
// method.
std::vector<PositionGroup> position_groups(const std::vector<NamedRecipe>& recipes);

// The command that compares the recipes of these groups, all with the position scaling of `like`, which is one of them,
// in folders beside `options.out`; three lines for a shell.
std::string equal_positions_command(const std::vector<NamedRecipe>& recipes, const NamedRecipe& like,
                                    const CompareOptions& options);

}  // namespace tapetune
