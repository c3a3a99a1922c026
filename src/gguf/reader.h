// A GGUF file, mapped: its metadata by key and its tensors by name. All counts, lengths and offsets are checked before
// they are used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/file.h"
#include "gguf/format.h"

namespace tapetune::gguf {

// One value of the metadata, as it stands in the file.
struct Value {
  Kind kind;  // for an array, of its elements
  bool is_array = false;
  std::uint64_t count = 1;
  std::span<const std::byte> bytes;
};

struct StoredBlocks {
  const BlockFormat* format = nullptr;
  std::vector<std::int64_t> shape;   // outermost first, as everywhere but in GGUF
  std::span<const std::byte> bytes;  // within the file
};

class File {
 public:
  static File open(const std::filesystem::path& path);
  // The bytes must outlive the result; `where` names them in errors.
  static File parse(std::span<const std::byte> bytes, std::string where);

  const std::string& where() const { return where_; }
  const std::map<std::string, StoredBlocks, std::less<>>& tensors() const { return tensors_; }
  const StoredBlocks* tensor(std::string_view name) const;

  // Nothing where the key is absent; a value of another kind is refused.
  bool has(std::string_view key) const { return values_.contains(key); }
  std::optional<std::string> text(std::string_view key) const;
  std::optional<std::int64_t> whole(std::string_view key) const;
  std::optional<double> number(std::string_view key) const;
  std::optional<bool> flag(std::string_view key) const;
  std::vector<std::string> texts(std::string_view key) const;
  std::vector<double> numbers(std::string_view key) const;

 private:
  const Value* find(std::string_view key, bool array) const;
  [[noreturn]] void wrong_kind(std::string_view key, std::string_view rule) const;

  std::shared_ptr<const MappedFile> mapped_;
  std::string where_;
  std::map<std::string, Value, std::less<>> values_;
  std::map<std::string, StoredBlocks, std::less<>> tensors_;
};

}  // namespace tapetune::gguf
