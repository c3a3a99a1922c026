#include "data/text_files.h"

#include <glob.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>
#include <zstd_errors.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <optional>

#include "core/error.h"
#include "core/file.h"
#include "core/signals.h"
#include "data/utf8.h"

namespace tapetune {
namespace fs = std::filesystem;

namespace {

constexpr std::size_t block_bytes = 256 << 10;

std::optional<TextFile> by_extension(const fs::path& path) {
  TextFile file{path};
  fs::path name = path.filename();
  if (name.extension() == ".gz") file.packing = TextFile::Packing::gzip;
  if (name.extension() == ".zst") file.packing = TextFile::Packing::zstd;
  if (file.packing != TextFile::Packing::plain) name = name.stem();
  if (name.extension() == ".jsonl") file.kind = TextFile::Kind::json_lines;
  if (name.extension() != ".jsonl" && name.extension() != ".txt") return std::nullopt;
  return file;
}

void add_file(const fs::path& path, std::vector<TextFile>& files) {
  std::error_code status;
  std::optional<TextFile> file = by_extension(path);
  if (!file) {
    fail("data", "{}: cannot be packed; give .txt or .jsonl, also with .gz or .zst.", path.string());
  }
  file->bytes = fs::file_size(path, status);
  if (status) fail("data", "{}: cannot be read: {}; check the path.", path.string(), status.message());
  ::close(open_regular(path));
  files.push_back(*file);
}

void add_folder(const fs::path& folder, std::vector<TextFile>& files, std::map<std::string, std::size_t>* skipped) {
  std::vector<fs::path> found;
  std::error_code status;
  for (fs::recursive_directory_iterator entry(folder, status), end; !status && entry != end; entry.increment(status)) {
    std::error_code dangling;  // a link to nothing is no file
    if (!entry->is_regular_file(dangling)) continue;
    const fs::path& path = entry->path();
    if (by_extension(path)) {
      found.push_back(path);
    } else if (skipped != nullptr && !path.filename().string().starts_with('.')) {
      ++(*skipped)[path.has_extension() ? path.extension().string() : "without extension"];
    }
  }
  if (status) fail("data", "{}: cannot be listed: {}; check the permissions.", folder.string(), status.message());
  if (found.empty())
    fail("data", "{}: contains no .txt or .jsonl (also with .gz or .zst); check the path.", folder.string());
  std::ranges::sort(found, {}, &fs::path::native);
  for (const fs::path& path : found) add_file(path, files);
}

bool is_pattern(const std::string& input) { return input.find_first_of("*?[") != std::string::npos; }

std::vector<fs::path> matches(const std::string& pattern) {
  glob_t found{};
  std::vector<fs::path> paths;
  if (::glob(pattern.c_str(), GLOB_NOSORT, nullptr, &found) == 0)
    paths.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  ::globfree(&found);
  std::ranges::sort(paths, {}, &fs::path::native);  // not as the locale would
  return paths;
}

}  // namespace

bool is_text_input(const std::string& input) {
  std::error_code status;
  if (fs::exists(input, status)) return fs::is_directory(input, status) || by_extension(input);
  return by_extension(input) || is_pattern(input);
}

bool input_exists(const std::string& input) {
  std::error_code status;
  return fs::exists(input, status) || (is_pattern(input) && !matches(input).empty());
}

std::vector<TextFile> find_text_files(std::span<const std::string> inputs,
                                      std::map<std::string, std::size_t>* skipped) {
  std::vector<TextFile> files;
  const auto add = [&](const fs::path& path) {
    std::error_code status;
    if (fs::is_directory(path, status)) {
      add_folder(path, files, skipped);
    } else if (fs::is_regular_file(path, status)) {
      add_file(path, files);
    } else {
      fail("data", "{}: is neither a file nor a folder; check the path.", path.string());
    }
  };
  for (const std::string& input : inputs) {
    std::error_code status;
    if (!fs::exists(input, status) && is_pattern(input)) {
      const std::vector<fs::path> paths = matches(input);
      if (paths.empty()) fail("data", "{}: matches no file; check the pattern.", input);
      for (const fs::path& path : paths) add(path);
    } else {
      add(input);
    }
  }
  if (files.empty()) fail("data", "there is no text to pack; give files, folders or patterns.");
  return files;
}

struct TextStream::State {
  fs::path path;
  TextFile::Packing packing;
  int descriptor;
  std::uint64_t consumed = 0;
  std::string block = std::string(block_bytes, '\0');  // packed bytes
  std::size_t begin = 0, end = 0;                      // those of the block that are not used yet
  z_stream gzip{};
  ZSTD_DStream* zstd = nullptr;
  bool within = false;  // a compressed stream has begun and not ended

  State(const TextFile& file) : path(file.path), packing(file.packing) {
    descriptor = open_regular(path);
    if (packing == TextFile::Packing::gzip && ::inflateInit2(&gzip, MAX_WBITS + 16) != Z_OK) throw std::bad_alloc();
    if (packing == TextFile::Packing::zstd) {
      zstd = ::ZSTD_createDStream();
      if (zstd == nullptr) throw std::bad_alloc();
      ::ZSTD_DCtx_setParameter(zstd, ZSTD_d_windowLogMax, 31);  // files of zstd --long
    }
  }
  ~State() {
    ::close(descriptor);
    if (packing == TextFile::Packing::gzip) ::inflateEnd(&gzip);
    ::ZSTD_freeDStream(zstd);
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  [[noreturn]] void damaged(std::string_view why) const {
    fail("data", "{}: is damaged near byte {} ({}); copy or download it again.", path.string(), consumed, why);
  }

  std::size_t read_block(char* bytes, std::size_t size) {
    for (;;) {
      const ssize_t count = ::read(descriptor, bytes, size);
      if (count < 0 && errno == EINTR) {
        check_interrupted();
        continue;
      }
      if (count < 0) fail("data", "{}: reading failed: {}.", path.string(), errno_text(errno));
      consumed += static_cast<std::uint64_t>(count);
      return static_cast<std::size_t>(count);
    }
  }

  // Unpacks from the block into out; returns how many bytes came out.
  std::size_t inflate(char* out, std::size_t size) {
    gzip.next_in = reinterpret_cast<Bytef*>(block.data() + begin);
    gzip.avail_in = static_cast<uInt>(end - begin);
    gzip.next_out = reinterpret_cast<Bytef*>(out);
    gzip.avail_out = static_cast<uInt>(size);
    within = true;
    const int status = ::inflate(&gzip, Z_NO_FLUSH);
    begin = end - gzip.avail_in;
    if (status == Z_STREAM_END) {  // another may follow, as bgzip and cat make them
      within = false;
      ::inflateReset(&gzip);
    } else if (status != Z_OK && status != Z_BUF_ERROR) {
      damaged(gzip.msg != nullptr ? gzip.msg : "not gzip");
    }
    return size - gzip.avail_out;
  }

  std::size_t decompress(char* out, std::size_t size) {
    ZSTD_inBuffer from{block.data(), end, begin};
    ZSTD_outBuffer to{out, size, 0};
    const std::size_t status = ::ZSTD_decompressStream(zstd, &to, &from);
    if (::ZSTD_getErrorCode(status) == ZSTD_error_memory_allocation) throw std::bad_alloc();
    if (::ZSTD_isError(status) != 0) damaged(::ZSTD_getErrorName(status));
    begin = from.pos;
    within = status != 0;
    return to.pos;
  }
};

TextStream::TextStream(const TextFile& file) : state_(std::make_unique<State>(file)) {}
TextStream::~TextStream() = default;
std::uint64_t TextStream::consumed() const { return state_->consumed; }

bool TextStream::read(std::string& text) {
  State& s = *state_;
  const std::size_t before = text.size();
  text.resize(before + block_bytes);
  char* out = text.data() + before;
  std::size_t count = 0;
  if (s.packing == TextFile::Packing::plain) {
    count = s.read_block(out, block_bytes);
  } else {
    while (count == 0) {
      // A full output buffer can leave unpacked bytes inside with no input left, so that the end shows only when
      // nothing more comes out.
      if (s.begin == s.end) {
        s.begin = 0;
        s.end = s.read_block(s.block.data(), block_bytes);
      }
      const bool no_input = s.begin == s.end;
      if (no_input && !s.within) break;
      count = s.packing == TextFile::Packing::gzip ? s.inflate(out, block_bytes) : s.decompress(out, block_bytes);
      if (no_input && count == 0 && s.within) s.damaged("it ends early");
    }
  }
  text.resize(before + count);
  return count > 0;
}

namespace {

// Takes the string under one key of the outermost object and keeps nothing else.
class KeyReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  KeyReader(const std::string& key, std::string& text) : wanted_(&key), text_(&text) {}
  bool object() const { return object_; }
  bool found() const { return found_; }
  bool other() const { return other_; }  // the key is there with something that is no text

  bool null() override { return value(); }
  bool boolean(bool) override { return value(); }
  bool number_integer(number_integer_t) override { return value(); }
  bool number_unsigned(number_unsigned_t) override { return value(); }
  bool number_float(number_float_t, const string_t&) override { return value(); }
  bool binary(binary_t&) override { return value(); }
  bool string(string_t& text) override {
    if (depth_ == 1 && next_) {
      std::swap(*text_, text);
      found_ = true;
      next_ = false;
    }
    return true;
  }
  bool key(string_t& name) override {
    if (depth_ == 1) next_ = name == *wanted_;
    return true;
  }
  bool start_object(std::size_t) override {
    object_ = object_ || depth_ == 0;
    return value() && ++depth_ > 0;
  }
  bool start_array(std::size_t) override { return value() && ++depth_ > 0; }
  bool end_object() override { return --depth_ >= 0; }
  bool end_array() override { return --depth_ >= 0; }
  bool parse_error(std::size_t, const std::string&, const nlohmann::json::exception&) override { return false; }

 private:
  bool value() {
    if (depth_ == 1 && next_) other_ = true;
    if (depth_ == 1) next_ = false;
    return true;
  }
  const std::string* wanted_;
  std::string* text_;
  int depth_ = 0;
  bool next_ = false, object_ = false, found_ = false, other_ = false;
};

// Halves of characters beyond 16 bits that stand alone, as \ud83d without its other half: Python writes and reads them,
// but they are no text. Puts U+FFFD in their place and returns how many there were.
std::size_t mend_surrogates(std::string& line) {
  const auto unit = [&](std::size_t at) -> unsigned {  // of \uXXXX, or 0
    if (at + 6 > line.size() || line[at] != '\\' || line[at + 1] != 'u') return 0;
    unsigned value = 0;
    const auto [end, status] = std::from_chars(line.data() + at + 2, line.data() + at + 6, value, 16);
    return status == std::errc() && end == line.data() + at + 6 ? value : 0;
  };
  std::size_t count = 0;
  for (std::size_t i = line.find('\\'); i < line.size(); i = line.find('\\', i)) {
    const unsigned first = unit(i), second = first == 0 ? 0 : unit(i + 6);
    if (first < 0xd800 || first > 0xdfff) {
      i += 2;
    } else if (first < 0xdc00 && second >= 0xdc00 && second <= 0xdfff) {
      i += 12;
    } else {
      line.replace(i + 2, 4, "fffd");
      i += 6;
      ++count;
    }
  }
  return count;
}

// Gives a line's text; returns how much of it was no UTF-8.
std::size_t read_line(std::string_view line, const TextFile& file, std::uint64_t number, const std::string& key,
                      const DocumentReader& reader) {
  if (line.find_first_not_of(" \t\r\n") == std::string_view::npos) return 0;
  std::size_t invalid = count_invalid_utf8(line);
  std::string mended = invalid > 0 ? replace_invalid_utf8(line) : std::string();
  if (invalid > 0) line = mended;
  std::string found;
  KeyReader keys(key, found);
  if (!nlohmann::json::sax_parse(line.begin(), line.end(), &keys)) {
    if (mended.empty()) mended = line;
    const std::size_t halves = mend_surrogates(mended);
    keys = KeyReader(key, found);
    if (halves == 0 || !nlohmann::json::sax_parse(mended.begin(), mended.end(), &keys))
      fail("data", "{}: line {} is not JSON; fix or remove it.", file.path.string(), number);
    invalid += halves;
  }
  if (!keys.object() || !(keys.found() || keys.other())) {
    fail("data", "{}: line {} has no key \"{}\"; tapetune data pack takes another with --key.", file.path.string(),
         number, key);
  }
  if (!keys.found())
    fail("data", "{}: line {} has a \"{}\" that is not text; tapetune data pack takes another key with --key.",
         file.path.string(), number, key);
  // In blocks, as from a .txt: whoever takes them need not hold the text once more.
  for (std::size_t begin = 0; begin < found.size(); begin += block_bytes)
    reader.text(std::string_view(found).substr(begin, block_bytes), number);
  reader.end();
  return invalid;
}

std::size_t read_json_lines(const TextFile& file, const std::string& key, const DocumentReader& reader) {
  TextStream stream(file);
  std::string lines;
  std::size_t searched = 0, invalid = 0;
  std::uint64_t number = 1, reported = 0;
  for (bool more = true; more;) {
    more = stream.read(lines);
    if (!more) lines += '\n';  // a last line without an end counts too
    std::size_t begin = 0;
    const auto require_short = [&](std::size_t size) {
      if (size <= longest_json_line) return;
      fail("data", "{}: line {} is longer than {} MB, which is the limit for a line of JSON; split it.",
           file.path.string(), number, longest_json_line >> 20);
    };
    for (std::size_t at; (at = lines.find('\n', searched)) != std::string::npos; searched = begin = at + 1) {
      require_short(at - begin);
      invalid += read_line(std::string_view(lines).substr(begin, at - begin), file, number++, key, reader);
    }
    lines.erase(0, begin);
    searched = lines.size();
    require_short(lines.size());
    if (lines.empty()) lines.shrink_to_fit();  // after one very long line
    reader.consumed(stream.consumed() - reported);
    reported = stream.consumed();
  }
  return invalid;
}

void read_text_file(const TextFile& file, const std::string& delimiter, const DocumentReader& reader) {
  TextStream stream(file);
  std::string held;
  std::uint64_t given = 0, reported = 0;  // given: the byte of the text at which `held` begins
  while (stream.read(held)) {
    std::size_t begin = 0;
    if (!delimiter.empty()) {
      for (std::size_t at; (at = held.find(delimiter, begin)) != std::string::npos; begin = at + delimiter.size()) {
        reader.text(std::string_view(held).substr(begin, at - begin), given + begin);
        reader.end();
      }
    }
    // The beginning of a delimiter may stand at the end of the block.
    const std::size_t kept = std::min(held.size() - begin, delimiter.empty() ? 0 : delimiter.size() - 1);
    reader.text(std::string_view(held).substr(begin, held.size() - kept - begin), given + begin);
    given += held.size() - kept;
    held.erase(0, held.size() - kept);
    reader.consumed(stream.consumed() - reported);
    reported = stream.consumed();
  }
  reader.text(held, given);
  reader.end();
}

}  // namespace

std::size_t read_documents(const TextFile& file, const DocumentFormat& format, const DocumentReader& reader) {
  if (file.kind == TextFile::Kind::json_lines) return read_json_lines(file, format.key, reader);
  read_text_file(file, format.delimiter, reader);
  return 0;
}

}  // namespace tapetune
