// Random texts as token files of the tiny models.
#pragma once

#include <random>

#include "data/token_file.h"
#include "support.h"

namespace tapetune::test {

inline constexpr std::int64_t vocabulary = 61;

inline std::vector<std::uint32_t> random_tokens(std::int64_t count, unsigned seed = 7) {
  std::mt19937 random(seed);
  std::vector<std::uint32_t> tokens;
  for (std::int64_t i = 0; i < count; ++i) tokens.push_back(3 + random() % 58);
  return tokens;
}

inline TokenFile write_tokens(const std::filesystem::path& path, const std::vector<std::uint32_t>& tokens,
                              std::uint64_t hash = 1) {
  TokenFileInfo info;
  info.vocabulary_hash = hash;
  info.vocabulary_size = vocabulary;
  TokenFileWriter writer(path, true, info);
  writer.append(tokens);
  writer.end_document();
  writer.commit();
  return TokenFile::open(path);
}

}  // namespace tapetune::test
