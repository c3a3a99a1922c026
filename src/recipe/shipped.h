// The recipes that come with tapetune.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace tapetune {

// The folder of $TAPETUNE_RECIPES, or the one installed beside the program, or the source's; fails where none is there.
std::filesystem::path shipped_recipes();

struct ShippedRecipe {
  std::string name;     // llama2-7b-8k/tape
  std::string summary;  // the first line of its comment that is not the command
  std::filesystem::path file;
};

std::vector<ShippedRecipe> list_recipes();

// A file as it is, or a shipped recipe: llama2-7b-8k/tape, with or without recipes/ before and .yaml behind. Fails with
// the nearest name.
std::filesystem::path find_recipe(const std::string& name);

}  // namespace tapetune
