// The Python files of adapters/positions/tape, as they are in the program.
#pragma once

#include <span>
#include <string_view>

namespace tapetune {

struct TapeFile {
  std::string_view name, text;
};

std::span<const TapeFile> tape_files();

}  // namespace tapetune
