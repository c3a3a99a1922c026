#include "data/token_file.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "core/error.h"

namespace tapetune {
namespace fs = std::filesystem;

namespace {

static_assert(std::endian::native == std::endian::little, "token files are little-endian and used as they lie");

constexpr std::array<char, 8> magic{'T', 'A', 'P', 'E', 'T', 'O', 'K', '\n'};
constexpr std::uint32_t this_version = 1;
constexpr std::int64_t widest_short = 1 << 16;  // vocabularies up to here have 16-bit tokens
constexpr std::size_t buffer_bytes = 1 << 20;

// As it lies on disk. Then the tokens, zeros up to a multiple of eight, and the end of each document as 64 bits.
struct Header {
  std::array<char, 8> magic{};
  std::uint32_t version = 0, token_bytes = 0;
  std::uint64_t vocabulary_size = 0, vocabulary_hash = 0, tokens = 0, documents = 0;
  std::int64_t bos = -1, eos = -1;
  std::array<std::uint64_t, 8> reserved{};
};
static_assert(sizeof(Header) == 128);

std::uint64_t padded(std::uint64_t bytes) { return (bytes + 7) / 8 * 8; }

// Bytes of the file that the header speaks of, or nothing where no file can be so large.
std::optional<std::uint64_t> expected_size(const Header& header) {
  constexpr std::uint64_t limit = std::uint64_t{1} << 56;
  if (header.tokens > limit || header.documents > limit) return std::nullopt;
  return sizeof(Header) + padded(header.tokens * header.token_bytes) + header.documents * sizeof(std::uint64_t);
}

std::optional<std::int64_t> id_or_none(std::int64_t id) { return id < 0 ? std::nullopt : std::optional(id); }

template <typename Id>
std::int64_t widen(std::span<const std::byte> bytes, std::span<std::int64_t> ids) {
  std::int64_t largest = 0;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    Id id;
    std::memcpy(&id, bytes.data() + i * sizeof(Id), sizeof(Id));
    ids[i] = id;
    largest = std::max<std::int64_t>(largest, id);
  }
  return largest;
}

}  // namespace

TokenFile::TokenFile(std::shared_ptr<const MappedFile> file, const TokenFileInfo& info,
                     std::span<const std::byte> tokens, std::span<const std::byte> ends)
    : file_(std::move(file)), info_(info), tokens_(tokens), ends_(ends) {}

TokenFile TokenFile::open(const fs::path& path) {
  auto file = MappedFile::open(path);
  const std::span<const std::byte> bytes = file->bytes();
  if (std::memcmp(bytes.data(), magic.data(), std::min(magic.size(), bytes.size())) != 0) {
    fail("data",
         "{}: is not a token file; make one with tapetune data pack. 16-bit tokens without a header need the extension "
         ".bin (data show: --raw).",
         path.string());
  }
  if (bytes.size() < sizeof(Header))
    fail("data", "{}: is truncated within its header; copy or pack it again.", path.string());
  Header header;
  std::memcpy(&header, bytes.data(), sizeof(Header));
  if (header.version > this_version) {
    fail("data", "{}: is of version {}, but this tapetune reads up to {}; use a newer one or pack the text again.",
         path.string(), header.version, this_version);
  }
  const std::optional<std::uint64_t> expected = expected_size(header);
  if (header.version == 0 || (header.token_bytes != 2 && header.token_bytes != 4) || !expected ||
      header.vocabulary_size == 0 || header.vocabulary_size > std::uint64_t{1} << 32) {
    fail("data", "{}: has a damaged header; copy or pack it again.", path.string());
  }
  if (*expected != bytes.size()) {
    fail("data", "{}: has {} bytes, but its header says {} ({} tokens, {} documents); copy or pack it again.",
         path.string(), bytes.size(), *expected, header.tokens, header.documents);
  }
  if (header.tokens == 0) fail("data", "{}: contains no tokens; pack some text.", path.string());
  TokenFileInfo info;
  info.token_bytes = header.token_bytes;
  info.vocabulary_hash = header.vocabulary_hash;
  info.vocabulary_size = static_cast<std::int64_t>(header.vocabulary_size);
  info.tokens = static_cast<std::int64_t>(header.tokens);
  info.documents = static_cast<std::int64_t>(header.documents);
  info.bos = id_or_none(header.bos);
  info.eos = id_or_none(header.eos);
  const std::size_t token_bytes = header.tokens * header.token_bytes;
  return TokenFile(std::move(file), info, bytes.subspan(sizeof(Header), token_bytes),
                   bytes.subspan(sizeof(Header) + padded(token_bytes)));
}

TokenFile TokenFile::open_raw(const fs::path& path, std::int64_t vocabulary_size) {
  auto file = MappedFile::open(path);
  const std::span<const std::byte> bytes = file->bytes();
  if (bytes.size() >= magic.size() && std::memcmp(bytes.data(), magic.data(), magic.size()) == 0)
    fail("data", "{}: is a token file with a header; rename it to .tokens (data show: drop --raw).", path.string());
  if (bytes.size() % sizeof(std::uint16_t) != 0) {
    fail("data", "{}: has {} bytes, which is not a multiple of two for 16-bit tokens; copy it again.", path.string(),
         bytes.size());
  }
  TokenFileInfo info;
  info.vocabulary_size = std::min(vocabulary_size, widest_short);
  info.tokens = static_cast<std::int64_t>(bytes.size() / sizeof(std::uint16_t));
  info.raw = true;
  return TokenFile(std::move(file), info, bytes, {});
}

void TokenFile::read(std::int64_t begin, std::span<std::int64_t> ids) const {
  const auto count = static_cast<std::int64_t>(ids.size());
  if (begin < 0 || begin > info_.tokens || count > info_.tokens - begin) {
    fail("data", "{}: tokens {} to {} are asked for, but it has {}.", path().string(), begin, begin + count,
         info_.tokens);
  }
  const auto bytes = tokens_.subspan(static_cast<std::size_t>(begin * info_.token_bytes));
  const std::int64_t largest =
      info_.token_bytes == 2 ? widen<std::uint16_t>(bytes, ids) : widen<std::uint32_t>(bytes, ids);
  if (largest >= info_.vocabulary_size) {
    fail("data", "{}: has the token {}, but its vocabulary has {}; {}.", path().string(), largest,
         info_.vocabulary_size,
         info_.raw ? "it was made with another tokenizer, or is not 16-bit tokens" : "copy or pack it again");
  }
}

std::pair<std::int64_t, std::int64_t> TokenFile::document(std::int64_t index) const {
  if (index < 0 || index >= info_.documents)
    fail("data", "{}: document {} is asked for, but it has {}.", path().string(), index, info_.documents);
  const auto end_of = [&](std::int64_t i) {
    std::uint64_t end = 0;
    if (i >= 0) std::memcpy(&end, ends_.data() + static_cast<std::size_t>(i) * sizeof(end), sizeof(end));
    return end;
  };
  const std::uint64_t begin = end_of(index - 1), end = end_of(index);
  if (begin > end || end > static_cast<std::uint64_t>(info_.tokens))
    fail("data", "{}: its list of documents is damaged; copy or pack it again.", path().string());
  return {static_cast<std::int64_t>(begin), static_cast<std::int64_t>(end)};
}

void TokenFile::require_vocabulary(const Vocabulary& vocabulary) const {
  if (info_.raw || (info_.vocabulary_hash == vocabulary.hash && info_.vocabulary_size == vocabulary.size)) return;
  fail("data",
       "{} was packed with another tokenizer ({} tokens, {:016x}) than {} ({} tokens, {:016x}); pack the text again "
       "with this model.",
       path().string(), info_.vocabulary_size, info_.vocabulary_hash, vocabulary.where, vocabulary.size,
       vocabulary.hash);
}

TokenFileWriter::TokenFileWriter(const fs::path& target, bool replace, const TokenFileInfo& settings)
    : folder_(target.parent_path()), out_(target, replace), info_(settings) {
  info_.token_bytes = info_.vocabulary_size <= widest_short ? 2 : 4;
  info_.tokens = info_.documents = 0;
  info_.raw = false;
  buffer_.reserve(buffer_bytes);
  const Header empty;  // without the magic: should this ever get the final name, nobody takes it for whole
  out_.write(std::as_bytes(std::span(&empty, 1)));
}

void TokenFileWriter::append(std::span<const std::uint32_t> ids) {
  for (const std::uint32_t id : ids) {
    if (id >= info_.vocabulary_size)
      fail("data", "token {} is outside of the vocabulary of {}.", id, info_.vocabulary_size);
  }
  const auto width = static_cast<std::size_t>(info_.token_bytes);
  info_.tokens += static_cast<std::int64_t>(ids.size());
  while (!ids.empty()) {
    if (buffer_.size() + width > buffer_bytes) flush();
    const std::size_t begin = buffer_.size(), count = std::min(ids.size(), (buffer_bytes - begin) / width);
    buffer_.resize(begin + count * width);
    for (std::size_t i = 0; i < count; ++i)
      std::memcpy(buffer_.data() + begin + i * width, &ids[i], width);  // little-endian: the low bytes come first
    ids = ids.subspan(count);
  }
}

void TokenFileWriter::end_document() {
  ends_.push_back(static_cast<std::uint64_t>(info_.tokens));
  ++info_.documents;
  if (ends_.size() * sizeof(std::uint64_t) >= buffer_bytes) flush_ends();
}

void TokenFileWriter::flush() {
  out_.write(buffer_);
  buffer_.clear();
}

void TokenFileWriter::flush_ends() {
  // There may be more documents than memory is for; they wait in a file of their own.
  if (!out_ends_) out_ends_.emplace(folder_);
  out_ends_->write(std::as_bytes(std::span(ends_)));
  ends_.clear();
}

void TokenFileWriter::commit() {
  const auto bytes = static_cast<std::uint64_t>(info_.tokens * info_.token_bytes);
  flush();
  out_.write(std::string(padded(bytes) - bytes, '\0'));
  if (out_ends_) {
    flush_ends();
    out_ends_->read([this](std::span<const std::byte> part) { out_.write(part); });
    out_ends_.reset();
  } else {
    out_.write(std::as_bytes(std::span(ends_)));
  }

  Header header;
  header.magic = magic;
  header.version = this_version;
  header.token_bytes = static_cast<std::uint32_t>(info_.token_bytes);
  header.vocabulary_size = static_cast<std::uint64_t>(info_.vocabulary_size);
  header.vocabulary_hash = info_.vocabulary_hash;
  header.tokens = static_cast<std::uint64_t>(info_.tokens);
  header.documents = static_cast<std::uint64_t>(info_.documents);
  header.bos = info_.bos.value_or(-1);
  header.eos = info_.eos.value_or(-1);
  out_.rewrite(0, std::as_bytes(std::span(&header, 1)));
  out_.commit();
}

}  // namespace tapetune
