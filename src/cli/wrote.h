// What a command tells of the files that it has written.
#pragma once

#include <filesystem>
#include <string>

namespace tapetune::cli {

// "wrote models/lora-8k (5 files, 269 MB)", or "wrote model.gguf (1.2 GB)".
std::string wrote(const std::filesystem::path& path);
// The same, on stdout.
void print_wrote(const std::filesystem::path& path);

}  // namespace tapetune::cli
