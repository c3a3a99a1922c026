// Text files to a token file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "data/text_files.h"
#include "data/token_file.h"

namespace tapetune {

// A token around each document.
enum class Frame {
  automatic,  // BOS where the checkpoint puts one before a text; EOS where the tokenizer has one
  always,     // fails where the tokenizer has none
  never,
};

struct PackOptions {
  std::vector<std::string> inputs;  // files, folders, globs
  std::filesystem::path model;      // a folder with tokenizer.json
  std::filesystem::path out;
  DocumentFormat format;
  Frame bos = Frame::automatic, eos = Frame::automatic;
  bool strip = false;  // white space at both ends of a document
  bool replace = false;
  int threads = 0;  // 0 for all cores
};

struct Packed {
  TokenFileInfo info;
  std::size_t files = 0;
  std::uint64_t bytes = 0;  // of the files, as they are on disk
};

// Memory does not grow with the text. What cannot be split (see split_points.h) is tokenised whole, which takes up to
// 220 times its size, so that its length is limited: to `longest_stretch` within a document, and to `longest_text` for
// a whole document where the tokenizer has no split points. Empty documents are left out. Parts that are no UTF-8
// become U+FFFD, and a warning says how many.
Packed pack(const PackOptions& options);

}  // namespace tapetune
