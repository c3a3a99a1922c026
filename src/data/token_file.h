// A token file: a header, the ids of all documents one after the other, and where each document ends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "core/file.h"
#include "data/vocabulary.h"

namespace tapetune {

struct TokenFileInfo {
  std::int64_t token_bytes = 2;       // 2 or 4, by the size of the vocabulary
  std::uint64_t vocabulary_hash = 0;  // unknown, 0, of a raw file
  std::int64_t vocabulary_size = 0;
  std::int64_t tokens = 0, documents = 0;
  std::optional<std::int64_t> bos, eos;  // what stands before and after each document
  bool raw = false;                      // without header and documents
};

// Mapped: only what is read comes into memory. Copies share the map, and may be read from several threads.
class TokenFile {
 public:
  static TokenFile open(const std::filesystem::path& path);
  // 16-bit tokens and nothing else, as LongLoRA's .bin files.
  static TokenFile open_raw(const std::filesystem::path& path, std::int64_t vocabulary_size = 1 << 16);

  const TokenFileInfo& info() const { return info_; }
  const std::filesystem::path& path() const { return file_->path(); }
  std::int64_t size() const { return info_.tokens; }

  // The ids from begin on, as many as fit; fails where the file ends before, or an id is outside the vocabulary.
  void read(std::int64_t begin, std::span<std::int64_t> ids) const;
  // First token of a document and the one after its last, BOS and EOS among them.
  std::pair<std::int64_t, std::int64_t> document(std::int64_t index) const;
  // Fails when the file was packed with another vocabulary. A raw file cannot tell.
  void require_vocabulary(const Vocabulary& vocabulary) const;

 private:
  TokenFile(std::shared_ptr<const MappedFile> file, const TokenFileInfo& info, std::span<const std::byte> tokens,
            std::span<const std::byte> ends);
  std::shared_ptr<const MappedFile> file_;
  TokenFileInfo info_;
  std::span<const std::byte> tokens_, ends_;
};

// Appears under its name only when commit() is called, with everything on disk.
class TokenFileWriter {
 public:
  // Of the settings, the counts and the width are found while writing.
  TokenFileWriter(const std::filesystem::path& target, bool replace, const TokenFileInfo& settings);

  void append(std::uint32_t id) { append(std::span(&id, 1)); }
  void append(std::span<const std::uint32_t> ids);
  void end_document();
  const TokenFileInfo& info() const { return info_; }
  void commit();

 private:
  void flush();
  void flush_ends();
  std::filesystem::path folder_;
  WholeFile out_;
  std::optional<ScratchFile> out_ends_;
  TokenFileInfo info_;
  std::vector<std::byte> buffer_;
  std::vector<std::uint64_t> ends_;
};

}  // namespace tapetune
