// What tests of data share: token files of numbers that count up.
#pragma once

#include "data/token_file.h"
#include "hf/tokenizer.h"
#include "support.h"

namespace tapetune::test::token_files {

namespace fs = std::filesystem;

inline TokenFileInfo settings(std::int64_t vocabulary) {
  TokenFileInfo info;
  info.vocabulary_size = vocabulary;
  info.vocabulary_hash = 7;
  return info;
}

// A file of the tokens first, first + 1, …, as one document.
inline TokenFile counting_file(const fs::path& path, std::int64_t tokens, std::uint32_t first = 0) {
  TokenFileWriter writer(path, true, settings(1 << 20));
  for (std::uint32_t i = 0; i < tokens; ++i) writer.append(first + i);
  writer.end_document();
  writer.commit();
  return TokenFile::open(path);
}

inline TokenIds all_of(const TokenFile& file) {
  TokenIds ids(static_cast<std::size_t>(file.size()));
  file.read(0, ids);
  return ids;
}

inline std::size_t files_in(const fs::path& folder) {
  return static_cast<std::size_t>(std::distance(fs::directory_iterator(folder), fs::directory_iterator()));
}

}  // namespace tapetune::test::token_files
