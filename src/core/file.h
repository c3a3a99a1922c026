// Files that are mapped when read, and whole or absent when written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "core/mapped_file.h"

namespace tapetune {

std::string read_text(const std::filesystem::path& path);

// A file being written; every failure names the file and what the system said.
class OutputFile {
 public:
  explicit OutputFile(std::filesystem::path path);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  void write(std::span<const std::byte> bytes);
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }
  // Forces the data to the disk and closes.
  void finish();

 private:
  std::filesystem::path path_;
  int descriptor_;
  std::uint64_t written_ = 0, started_ = 0;  // bytes given, and of these on their way to the disk
};

// A folder that appears under its final name only when commit() is called, with everything in it on disk.
class StagedFolder {
 public:
  // Refuses an existing target unless it may be replaced; removes what an earlier, killed run left of its own.
  StagedFolder(std::filesystem::path target, bool replace);
  ~StagedFolder();
  StagedFolder(const StagedFolder&) = delete;
  StagedFolder& operator=(const StagedFolder&) = delete;

  const std::filesystem::path& path() const { return staging_; }
  void commit();

 private:
  [[noreturn]] void refuse_existing() const;
  std::filesystem::path target_;
  std::filesystem::path staging_;
  bool replace_;
};

// Fails when a file cannot be written there: a folder, a missing parent, or one that exists and may not be replaced.
void require_writable(const std::filesystem::path& target, bool replace);

// A single file that appears under its final name only when commit() is called.
class WholeFile {
 public:
  WholeFile(std::filesystem::path target, bool replace);
  ~WholeFile();
  WholeFile(const WholeFile&) = delete;
  WholeFile& operator=(const WholeFile&) = delete;

  void write(std::span<const std::byte> bytes) { out_->write(bytes); }
  void write(std::string_view text) { out_->write(text); }
  void commit();

 private:
  std::filesystem::path target_;
  std::filesystem::path partial_;
  std::unique_ptr<OutputFile> out_;
};

// Fails before any work when the disk that will hold path has less than this many bytes left.
void require_space(const std::filesystem::path& path, std::uint64_t bytes);

}  // namespace tapetune
