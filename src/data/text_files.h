// Text to pack: which files, and their documents, streamed out of plain, gzip and zstd files.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tapetune {

struct TextFile {
  enum class Kind { text, json_lines };
  enum class Packing { plain, gzip, zstd };
  std::filesystem::path path;
  Kind kind = Kind::text;
  Packing packing = Packing::plain;
  std::uint64_t bytes = 0;  // on disk
};

// Whether this names text to pack: by its extension, as a folder, or as a pattern.
bool is_text_input(const std::string& input);
// Whether there is such a file or folder, or a file that matches the pattern.
bool input_exists(const std::string& input);

// Files in the order given; those of a folder (with all below it) or a glob in the order of their bytes. All can be
// opened, none has an unknown extension; in a folder such files are skipped, and counted by extension in `skipped`.
std::vector<TextFile> find_text_files(std::span<const std::string> inputs,
                                      std::map<std::string, std::size_t>* skipped = nullptr);

// The bytes of a file, unpacked as they come.
class TextStream {
 public:
  explicit TextStream(const TextFile& file);
  ~TextStream();
  TextStream(const TextStream&) = delete;
  TextStream& operator=(const TextStream&) = delete;

  // Appends the next bytes; false, and nothing, at the end.
  bool read(std::string& text);
  std::uint64_t consumed() const;  // bytes of the file so far

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// A line of JSON is held whole, and parsing it takes up to eight times its size in memory.
constexpr std::uint64_t longest_json_line = std::uint64_t{100} << 20;

struct DocumentFormat {
  std::string delimiter;     // of .txt; empty: a file is a document
  std::string key = "text";  // of .jsonl
};

struct DocumentReader {
  // Some of a document's text, and where it is: the byte of the unpacked .txt, the line of the .jsonl.
  std::function<void(std::string_view, std::uint64_t)> text;
  std::function<void()> end;                    // a document ends
  std::function<void(std::uint64_t)> consumed;  // bytes of the file, for the progress
};

// What a file holds. Returns the number of invalid parts of UTF-8 that were replaced on the way, which are those of
// JSON; other text is given as it is.
std::size_t read_documents(const TextFile& file, const DocumentFormat& format, const DocumentReader& reader);

}  // namespace tapetune
