// Files that are mapped into memory to be read.
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>

namespace tapetune {

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
  struct Entry;
  MappedFile(std::filesystem::path path, std::span<const std::byte> bytes);
  std::filesystem::path path_;
  std::span<const std::byte> bytes_;
  Entry* entry_;

  friend void watch_mapped_files();
  friend void fail_if_unreadable(std::span<const std::byte> bytes);
};

// From now on, touching a mapped file that shrank or cannot be read ends the program with one line that names the file,
// in place of SIGBUS; any other SIGBUS does what it did before.
void watch_mapped_files();
// After a system call could not read these bytes (EFAULT): the same line as an Error, where they are of a mapped file.
void fail_if_unreadable(std::span<const std::byte> bytes);

}  // namespace tapetune
