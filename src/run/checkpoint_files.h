// hashes.json in a checkpoint of a run: size and BLAKE3 of each of its files.
#pragma once

#include <exception>
#include <filesystem>
#include <string>

namespace tapetune {

// 64 hexadecimal digits; never more than a few MB of the file in memory.
std::string hash_of_file(const std::filesystem::path& path);

// Adds hashes.json for all files of the folder.
void write_hashes(const std::filesystem::path& checkpoint);

// What is wrong with a checkpoint of a run: a file that is missing, cut off, changed or unreadable; empty: nothing.
// One of an earlier version has no hashes; then only what its files say of themselves is checked.
std::string damage_of(const std::filesystem::path& checkpoint);
// What an exception says as a part of a sentence: without the component before it and the full stop.
std::string words_of(const std::exception& error);

bool has_hashes(const std::filesystem::path& checkpoint);

}  // namespace tapetune
