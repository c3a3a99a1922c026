// Files that are mapped when read, and whole or absent when written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "core/mapped_file.h"

namespace tapetune {

class Partial;

// Forces the names in a folder to the disk.
void sync_folder(const std::filesystem::path& folder);

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

// A new file in a folder of our own; every failure names the file and what the system said.
class OutputFile {
 public:
  explicit OutputFile(std::filesystem::path path);
  // Takes over a descriptor that was opened for writing.
  OutputFile(std::filesystem::path path, int descriptor);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  void write(std::span<const std::byte> bytes);
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }
  void rewrite(std::uint64_t offset, std::span<const std::byte> bytes);
  // Forces the data to the disk and closes.
  void finish();

 private:
  friend class ScratchFile;
  std::filesystem::path path_;
  int descriptor_;
  std::uint64_t written_ = 0, started_ = 0;  // bytes given, and of these on their way to the disk
};

// Whether a command writes a file of this name itself.
using WritesName = bool (*)(std::string_view name);

// A folder that appears under its final name only when commit() is called, with everything in it on disk.
class StagedFolder {
 public:
  // What becomes of other files in a folder that is replaced.
  enum class Others { refuse, keep };

  // Refuses an existing target unless it may be replaced, and one that may where it has files that the command does not
  // write (writes: which it does; null: all).
  StagedFolder(std::filesystem::path target, bool replace, WritesName writes = nullptr, Others others = Others::refuse);
  ~StagedFolder();
  StagedFolder(const StagedFolder&) = delete;
  StagedFolder& operator=(const StagedFolder&) = delete;

  const std::filesystem::path& path() const;
  void commit();

 private:
  void require_replaceable() const;
  void take_over_others() const;
  [[noreturn]] void refuse_existing() const;
  std::filesystem::path target_;
  bool replace_;
  WritesName writes_;
  Others others_;
  std::unique_ptr<Partial> partial_;
};

// Fails when a file cannot be written there: a folder, a missing parent, or one that exists and may not be replaced.
void require_writable(const std::filesystem::path& target, bool replace);

// Whether a path is another one or below it, with links resolved.
bool is_inside(const std::filesystem::path& inner, const std::filesystem::path& outer);

// Fails where the output is one of the inputs, or a folder that holds one, or a file inside an input folder that the
// command would replace (a .gguf file is nobody's input there).
void require_not_input(const std::filesystem::path& target, std::span<const std::filesystem::path> inputs);

// A single file that appears under its final name only when commit() is called.
class WholeFile {
 public:
  WholeFile(std::filesystem::path target, bool replace);
  ~WholeFile();
  WholeFile(const WholeFile&) = delete;
  WholeFile& operator=(const WholeFile&) = delete;

  void write(std::span<const std::byte> bytes) { out_->write(bytes); }
  void write(std::string_view text) { out_->write(text); }
  // Over what was written there before.
  void rewrite(std::uint64_t offset, std::span<const std::byte> bytes) { out_->rewrite(offset, bytes); }
  // Fails where the target appeared meanwhile and may not be replaced.
  void commit();

 private:
  std::filesystem::path target_;
  bool replace_;
  std::unique_ptr<Partial> partial_;
  std::unique_ptr<OutputFile> out_;
};

// Bytes that are written, read once and forgotten; the file has no name that could be left behind.
class ScratchFile {
 public:
  explicit ScratchFile(const std::filesystem::path& folder);

  void write(std::span<const std::byte> bytes) { out_.write(bytes); }
  // Gives all that was written, in parts.
  void read(const std::function<void(std::span<const std::byte> part)>& take) const;

 private:
  OutputFile out_;
};

// Fails before any work when the disk that will hold path has less than this many bytes left.
void require_space(const std::filesystem::path& path, std::uint64_t bytes);

}  // namespace tapetune
