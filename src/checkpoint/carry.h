// The files beside a model's weights that a rewritten or merged model carries over: tokenizer and generation settings.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "core/json.h"

namespace tapetune {

// Whether a file of this name is carried over.
bool is_carried(std::string_view name);

// Those that the folder has. Fails where one is a link that leads out of the folder: what it leads to is not the
// model's. The Hugging Face cache's own links, from snapshots/REVISION to blobs, are followed.
std::vector<std::string> files_to_carry(const std::filesystem::path& folder);

// tokenizer_config.json of a folder; empty where it has none.
Json tokenizer_settings(const std::filesystem::path& folder);

// Removes auto_map from config.json and tokenizer_config.json, with a note, where it names Python files that are not
// among these: transformers would look for them in vain, or fetch them from somebody else's repository.
void drop_foreign_code(std::map<std::string, std::string>& files);

}  // namespace tapetune
