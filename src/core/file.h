// Files that are mapped when read, and whole or absent when written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace tapetune {

// A descriptor to read a regular file from. Folders, named pipes and devices are refused before they are opened,
// because opening a pipe waits for a writer and opening some devices has effects; the caller closes it.
int open_regular(const std::filesystem::path& path);

// Fails where the path is not a regular file, nor something that a shell hands over open: /dev/stdin, and /dev/fd/N of
// <(command). Opening anything else could wait for ever.
void require_readable(const std::filesystem::path& path);

// What a text file may have unless the caller says otherwise: four times the largest tokenizer.json of a known model.
constexpr std::uint64_t largest_text = std::uint64_t{128} << 20;

// All of a file that require_readable accepts; one with more than `limit` bytes is refused.
std::string read_text(const std::filesystem::path& path, std::uint64_t limit = largest_text);

// A read-only memory map of a whole file; the bytes live as long as a shared_ptr to it.
class MappedFile {
 public:
  static std::shared_ptr<const MappedFile> open(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return bytes_; }
  const std::filesystem::path& path() const { return path_; }
  // Gives the memory behind a part of bytes() back to the system; it is read anew when it is touched again.
  void release(std::span<const std::byte> part) const;

 private:
  MappedFile(std::filesystem::path path, std::span<const std::byte> bytes);
  std::filesystem::path path_;
  std::span<const std::byte> bytes_;
};

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
