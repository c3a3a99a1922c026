// What tokenizer.json says of its vocabulary: enough to tell two tokenizers apart.
#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <filesystem>
#include <string>

namespace tapetune {

struct Vocabulary {
  std::string where;       // the file it was read from
  std::uint64_t hash = 0;  // of all ids with their pieces; the same on every machine
  std::int64_t size = 0;   // one more than the largest id
};

// tokenizer.json of a checkpoint folder. Objects are trees: a vocabulary in a list would take quadratic time.
nlohmann::json read_tokenizer_json(const std::filesystem::path& folder);

Vocabulary vocabulary_of(const nlohmann::json& tokenizer, const std::filesystem::path& folder);
Vocabulary read_vocabulary(const std::filesystem::path& folder);

}  // namespace tapetune
