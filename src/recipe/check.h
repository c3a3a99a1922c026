// What cannot be together in a recipe, although each key is right by itself. Private to src/recipe.
#pragma once

#include "recipe/entries.h"
#include "recipe/recipe.h"

namespace tapetune::schema {

// Reports it, and fills in what follows from other keys.
void check_recipe(Recipe& recipe, Entries& entries);

}  // namespace tapetune::schema
