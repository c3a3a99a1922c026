// From a GGUF file to a Hugging Face folder.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <optional>

namespace tapetune::gguf {

struct ImportOptions {
  std::optional<at::ScalarType> dtype;  // unset: as stored, and f32 throughout where any tensor is quantised
  std::uint64_t shard_bytes = 5'000'000'000;
  bool replace = false;  // an existing folder
};

// Everything is checked before the first tensor is written; the folder is whole or absent.
void import_gguf(const std::filesystem::path& file, const std::filesystem::path& folder,
                 const ImportOptions& options = {});

}  // namespace tapetune::gguf
