// The token files of a recipe's data; text is packed into the run folder first.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "data/batches.h"
#include "distributed/world.h"
#include "recipe/recipe.h"

namespace tapetune {

struct BaseModel;

// Whether data number `index` is text to pack, or was: text that is gone is known by what the run folder has of it.
bool is_text_data(const Recipe& recipe, std::size_t index);

// The token file of data number `index`: what the recipe names, or for text its place in the run folder, where it may
// not be yet.
std::filesystem::path token_path(const Recipe& recipe, std::size_t index);

// Packs what is text as `data pack` does, once: a file that was packed before is used again. Before the first
// checkpoint, text or a tokenizer that changed is packed again; after it, text that changed is an error.
// tokenizer: folder with tokenizer.json.
void pack_text(const Recipe& recipe, const std::filesystem::path& tokenizer);

// pack_text on rank 0, for all ranks, which need its run folder for this. Fails where the folder holds a run of another
// recipe. written: the recipe as the run folder keeps it; recipe: with its paths as they are found.
void prepare_text(const Recipe& written, const Recipe& recipe, const std::filesystem::path& tokenizer, World& world);

// All token files, for messages.
std::string token_names(const Recipe& recipe);

// The recipe's windows; its text is packed, and its paths are as they are found.
Batches open_batches(const Recipe& recipe, const BaseModel& base);

// Gives the run of `to` the token files that the run of `from` packed from the same data.
void share_packed(const Recipe& from, const Recipe& to);

struct TrainingData {
  std::size_t index = 0;  // in the recipe's data
  bool whole = true;      // false: one file of a folder or a pattern
};

// Which of the recipe's data this path is: as the recipe names it, packed, or one of its files; none: not trained on.
std::optional<TrainingData> find_training_data(const Recipe& recipe, const std::string& path);

}  // namespace tapetune
