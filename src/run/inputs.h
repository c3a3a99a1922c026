// inputs.json in a run folder: where the recipe's paths led when the run trained, and which weight files it read. It
// is no part of the recipe, so that a run that moved is still the same run.
#pragma once

#include <filesystem>
#include <string>

#include "checkpoint/checkpoint.h"
#include "distributed/world.h"
#include "recipe/recipe.h"

namespace tapetune {

// Where a path of a run's recipe leads today. The first that exists: as written (from the current folder), from the run
// folder, at the same place beside a run folder that moved, at the absolute path that inputs.json keeps. As written
// where none does, so that opening it names what the recipe says.
std::filesystem::path find_path(const std::string& written, const std::filesystem::path& run);

// A run's recipe with all its paths (model, tokenizer, data, init_from) found like that. `say`: note on stderr what was
// not found as written.
Recipe with_found_paths(Recipe recipe, const std::filesystem::path& run, bool say = true);
// The same of RUN/recipe.yaml.
Recipe read_run_recipe(const std::filesystem::path& run, bool say = true);

// Records the absolute paths of a recipe, and size and mtime of its model's weight files beside the model's hash.
// recipe: as written.
void write_inputs(const std::filesystem::path& run, const Recipe& recipe);

// The hash of all weights, read with a progress bar; Ctrl-C ends it.
std::string hash_weights(const Checkpoint& base);

// The recipe with the hash of its base model's weights, which rank 0 reads all of; fails where the recipe has another.
// model: the folder as it was found.
Recipe with_hash(Recipe recipe, const std::string& model, World& world);

// Fails where the base model's weights are not those that the run was trained on, or with `any_base` warns. Reads no
// weights where their files have the recorded sizes and times; else, and in a run without a record, hashes all of them.
void require_trained_base(const std::filesystem::path& run, const Recipe& recipe, const Checkpoint& base,
                          bool any_base);

}  // namespace tapetune
