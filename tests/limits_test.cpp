// Inputs that ask for memory out of all proportion to their size, and paths that are no files.
#include <sys/resource.h>
#include <sys/stat.h>
#include <zlib.h>

#include <algorithm>
#include <random>
#include <thread>

#include "catch.h"
#include "core/error.h"
#include "core/file.h"
#include "core/json.h"
#include "core/log.h"
#include "data/encoder.h"
#include "data/pack.h"
#include "data/text_files.h"
#include "data/token_file.h"
#include "data/vocabulary.h"
#include "hf/tokenizer.h"
#include "support.h"

namespace limits_test {

using namespace tapetune;
using namespace tapetune::test;
namespace fs = std::filesystem;

namespace {

constexpr std::uint64_t gigabyte = 1'000'000'000;

// `before`, this byte as often as told, and `after`.
void write_gzip(const fs::path& path, const std::string& before, char byte, std::size_t count,
                const std::string& after = {}) {
  const gzFile file = ::gzopen(path.c_str(), "wb1");
  REQUIRE(file != nullptr);
  const std::string block(1 << 20, byte);
  REQUIRE(::gzwrite(file, before.data(), static_cast<unsigned>(before.size())) == static_cast<int>(before.size()));
  for (std::size_t left = count; left > 0; left -= std::min(left, block.size()))
    REQUIRE(::gzwrite(file, block.data(), static_cast<unsigned>(std::min(left, block.size()))) > 0);
  REQUIRE(::gzwrite(file, after.data(), static_cast<unsigned>(after.size())) == static_cast<int>(after.size()));
  REQUIRE(::gzclose(file) == Z_OK);
}

Json tokenizer_json(const fs::path& folder) { return from_text(read_file(folder / "tokenizer.json")); }

// A folder with a model's tokenizer, and data pack in a process of its own.
struct Pack {
  Pack() {
    fs::create_directory(folder / "m");
    fs::create_directory(folder / "out");
    tiny_tokenizer(folder / "m");
  }
  RunResult operator()(const std::string& name) const {
    return run({"-q", "data", "pack", (folder / name).string(), "--model", (folder / "m").string(), "--out",
                (folder / "out" / "f.tokens").string(), "--force"});
  }
  // Refused in one line with these words, with little memory and nothing left behind.
  void refused(const std::string& name, const std::string& words) const {
    const RunResult result = (*this)(name);
    CAPTURE(name, result.err);
    CHECK(result.exit == 1);
    CHECK_THAT(result.err, Contains(words) && Contains((folder / name).string()));
    CHECK(lines_of(result.err).size() == 1);
    CHECK(result.peak_bytes < gigabyte);
    CHECK(fs::is_empty(folder / "out"));
  }
  TempFolder folder;
};

// As tiny_tokenizer, with all bytes and with tokens for whatever stands side by side in odd_text, so that other splits
// give other ids.
void merging_tokenizer(const fs::path& folder, const std::string& regex) {
  tiny_tokenizer(folder);
  Json json = tokenizer_json(folder);
  Json vocab, merges = Json::array();
  for (const char* token : {"<unk>", "<s>", "</s>"}) vocab[token] = vocab.size();
  std::vector<std::string> alphabet;
  for (int byte = 0, other = 256; byte < 256; ++byte) {  // GPT-2's letters for bytes
    const bool plain = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
    const int code = plain ? byte : other++;
    std::string letter;
    if (code >= 128) letter += static_cast<char>(0xc0 | code >> 6);
    letter += static_cast<char>(code >= 128 ? 0x80 | (code & 0x3f) : code);
    vocab[letter] = vocab.size();
    if (std::string_view("\n\r\t a.1\xe3\x80\xe4\xb8\xad\xc2\xa0<s>").find(static_cast<char>(byte)) !=
        std::string_view::npos)
      alphabet.push_back(letter);
  }
  for (int round = 0; round < 2; ++round) {
    const std::vector<std::string> right = alphabet;
    for (const std::string& a : std::vector<std::string>(alphabet)) {
      for (const std::string& b : right) {
        if (vocab.contains(a + b) || vocab.size() > 6000) continue;
        merges.push_back(Json::array({a, b}));
        vocab[a + b] = vocab.size();
        if (round == 0) alphabet.push_back(a + b);
      }
    }
  }
  json["model"]["vocab"] = vocab;
  json["model"]["merges"] = merges;
  if (!regex.empty()) {
    json["pre_tokenizer"] = {
        {"type", "Sequence"},
        {"pretokenizers",
         {{{"type", "Split"}, {"pattern", {{"Regex", regex}}}, {"behavior", "Isolated"}, {"invert", false}},
          {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", false}}}}};
  }
  write_file(folder / "tokenizer.json", to_text(json));
}

std::string odd_text(std::size_t size, unsigned seed) {
  const std::vector<std::string> parts{"a",    "a",   "中", "中",     "。",     "。\n",           "\n", "\n", "\n\n",
                                       "\r\n", "\r",  "\t", "\u3000", "\u00a0", "\n\u3000\u3000", ".",  "1",  "\xff",
                                       "\xe3", "<s>", "'s"};
  std::mt19937 random(seed);
  std::string text;
  while (text.size() < size) text += parts[random() % parts.size()];
  return text;
}

constexpr const char* llama3_regex =
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| "
    "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
constexpr const char* qwen2_regex =
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+"
    "|\\s+(?!\\S)|\\s+";

std::string base64(const std::string& bytes) {
  constexpr std::string_view letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    unsigned three = 0;
    for (std::size_t k = 0; k < 3; ++k)
      three = three << 8 | (i + k < bytes.size() ? static_cast<unsigned char>(bytes[i + k]) : 0);
    for (std::size_t k = 0; k < 4; ++k) text += i + k > bytes.size() ? '=' : letters[three >> (18 - 6 * k) & 63];
  }
  return text;
}

std::string little_endian(std::uint32_t number) {
  std::string bytes;
  for (int shift = 0; shift < 32; shift += 8) bytes += static_cast<char>(number >> shift & 0xff);
  return bytes;
}

}  // namespace

TEST_CASE("data pack refuses megabytes without a place to cut, in less than 1 GB of memory") {
  const Pack pack;
  write_gzip(pack.folder / "a.txt.gz", "", 'a', 20'000'000);
  REQUIRE(fs::file_size(pack.folder / "a.txt.gz") < 100'000);
  pack.refused("a.txt.gz", "the text at byte 0 goes on for more than 3 MB without a place to split it");
  write_gzip(pack.folder / "b.txt.gz", "", '\0', 20'000'000);
  pack.refused("b.txt.gz", "it has NUL bytes, as binary files do; remove it, or split it with --delimiter");
  write_gzip(pack.folder / "c.txt.gz", "", '\xff', 1'100'000);  // each byte becomes the three of U+FFFD
  pack.refused("c.txt.gz", "the text at byte 0 goes on for more than 3 MB");
  write_file(pack.folder / "zeros.txt", "");
  fs::resize_file(pack.folder / "zeros.txt", std::uintmax_t{3} << 30);
  pack.refused("zeros.txt", "the text at byte 0 goes on for more than 3 MB");
  // Where the stretch begins, and not the piece that it is in.
  std::string words;
  while (words.size() < 1'000'000) words += " word";
  write_file(pack.folder / "d.txt", words + " " + std::string(5'000'000, 'x'));
  pack.refused("d.txt", "the text at byte 1000000 goes on for more than 3 MB");
  write_gzip(pack.folder / "e.jsonl.gz", "{\"text\": \"a\"}\n{\"text\": \"", 'a', 5'000'000, "\"}\n");
  pack.refused("e.jsonl.gz", "the text at line 2 goes on for more than 3 MB");
  write_gzip(pack.folder / "f.jsonl.gz", "{\"text\": \"", ' ', longest_json_line, "\"}\n");
  pack.refused("f.jsonl.gz", "line 1 is longer than 100 MB, which is the limit for a line of JSON; split it");
}

TEST_CASE("text without a place to cut is packed up to the limit, in less than 1 GB of memory") {
  const Pack pack;
  write_file(pack.folder / "f.txt", std::string(longest_stretch, 'a'));
  const RunResult packed = pack("f.txt");
  CAPTURE(packed.err);
  CHECK(packed.exit == 0);
  if (!has_address_sanitizer()) CHECK(packed.peak_bytes < gigabyte);
  CHECK(TokenFile::open(pack.folder.path() / "out" / "f.tokens").size() == longest_stretch + 2);  // BOS and EOS
}

TEST_CASE("a tokenizer without known split points packs books of some megabytes and refuses longer documents") {
  const Pack pack;
  Json json = tokenizer_json(pack.folder / "m");
  json["normalizer"] = {{"type", "Lowercase"}};
  write_file(pack.folder / "m/tokenizer.json", to_text(json));
  std::string book;
  while (book.size() < 5'000'000) book += "Some words that a book may have. ";
  write_file(pack.folder / "book.txt", book);
  const RunResult packed = pack("book.txt");
  CAPTURE(packed.err);
  CHECK(packed.exit == 0);
  fs::remove(pack.folder.path() / "out" / "f.tokens");
  write_gzip(pack.folder / "long.txt.gz", "", ' ', longest_text + 1);
  pack.refused("long.txt.gz",
               "the document at byte 0 has more than 8 MB, the limit for a tokenizer that takes "
               "documents whole; split the text into documents with --delimiter");
  write_gzip(pack.folder / "long.jsonl.gz", "{\"text\": \"a\"}\n{\"text\": \"", ' ', longest_text + 1, "\"}\n");
  pack.refused("long.jsonl.gz", "the document at line 2 has more than 8 MB");
}

TEST_CASE("pieces that begin after a line end give the ids of the whole") {
  const TempFolder folder;
  for (const char* regex : {"", llama3_regex, qwen2_regex}) {
    merging_tokenizer(folder.path(), regex);
    const Tokenizer tokenizer = Tokenizer::open(folder.path());
    TextEncoder encoder(tokenizer, read_tokenizer_json(folder.path()), 2);
    REQUIRE(encoder.split_points().any());
    std::size_t after_lines = 0;
    for (unsigned seed = 0; seed < 150; ++seed) {
      const std::string text = odd_text(1500, seed);
      std::vector<TextPiece> pieces;
      std::size_t begin = 0;
      for (std::size_t at; (at = encoder.split_points().next_piece(text, begin + 1 + seed % 40)) != std::string::npos;
           begin = at) {
        pieces.push_back({text.substr(begin, at - begin), begin == 0, false});
        if (text[at - 1] == '\n' && text[at] != ' ') ++after_lines;
      }
      pieces.push_back({text.substr(begin), begin == 0, true});
      TokenIds together;
      for (const auto& ids : encoder.encode(pieces)) together.insert(together.end(), ids.begin(), ids.end());
      CAPTURE(regex, seed);
      REQUIRE(together == tokenizer.encode(text, false));
    }
    CHECK(after_lines > 300);
  }
}

TEST_CASE("long text without spaces is packed where its lines end") {
  const Pack pack;
  merging_tokenizer(pack.folder / "m", qwen2_regex);
  std::string text;
  while (text.size() < longest_stretch + 500'000) text += "\u3000\u3000中中中中中中中中中中中中中中中中中中中中。\n";
  write_file(pack.folder / "f.txt", text);
  const RunResult packed = pack("f.txt");
  CAPTURE(packed.err);
  CHECK(packed.exit == 0);
}

TEST_CASE("a word without any token is left out where its first token would be dropped") {
  const TempFolder folder;
  tiny_tokenizer(folder.path());
  Json json = tokenizer_json(folder.path());
  json["model"].erase("unk_token");  // what is not in the vocabulary has no token
  write_file(folder / "tokenizer.json", to_text(json));
  const Tokenizer tokenizer = Tokenizer::open(folder.path());
  // Split points of a tokenizer that puts "▁" before each text, which this one does not.
  nlohmann::json other = nlohmann::json::parse(to_text(json));
  other["model"]["vocab"]["▁"] = 61;
  other["model"]["vocab"]["\n"] = 62;
  other["pre_tokenizer"] = {{"type", "Metaspace"}, {"replacement", "▁"}, {"prepend_scheme", "always"}};
  REQUIRE(SplitPoints(other).any());
  TextEncoder encoder(tokenizer, other, 1);  // tries a text in parts, finds other ids, and does without split points
  CHECK_FALSE(encoder.split_points().any());
  const TextPiece piece{"a\n?", true, true};
  CHECK(std::ranges::equal(encoder.encode(std::span(&piece, 1))[0], tokenizer.encode("a\n?", false)));
}

TEST_CASE("a tokenizer.json that asks for gigabytes is refused before they are allocated") {
  const TempFolder folder;
  tiny_tokenizer(folder.path());
  const Json good = tokenizer_json(folder.path());
  const auto with = [&](const char* pointer, const Json& value) {
    Json json = good;
    json[Json::json_pointer(pointer)] = value;
    write_file(folder / "tokenizer.json", to_text(json));
    return error_of([&] { Tokenizer::open(folder.path()); });
  };
  const auto charsmap = [](std::uint32_t trie, std::size_t bytes) {
    return Json{{"type", "Precompiled"},
                {"precompiled_charsmap", base64(little_endian(trie) + std::string(bytes, '\0'))}};
  };
  const std::string says = "its precompiled_charsmap has 1028 bytes, but says that 4294967292 of them are a trie";
  CHECK_THAT(with("/normalizer", charsmap(0xfffffffc, 1024)), Contains(says) && Contains("copy it again"));
  CHECK_THAT(with("/normalizer", {{"type", "Sequence"}, {"normalizers", {charsmap(0xfffffffc, 1024)}}}),
             Contains(says));
  CHECK_THAT(with("/normalizer", charsmap(1025, 1024)), Contains("says that 1025 of them are a trie"));
  CHECK_THAT(with("/normalizer", {{"type", "Precompiled"}, {"precompiled_charsmap", "AA"}}), Contains("is empty"));
  CHECK_THAT(with("/normalizer", {{"type", "Precompiled"}, {"precompiled_charsmap", "????"}}), Contains("not base64"));
  for (const std::size_t bytes : {1024U, 1025U, 1026U}) CHECK(with("/normalizer", charsmap(1024, bytes)) == "no error");

  const auto added = [&](std::size_t count, std::size_t bytes) {
    Json tokens = good["added_tokens"];
    for (std::size_t i = 0; i < count; ++i) {
      Json token = tokens[0];
      token["id"] = 100 + i;
      token["content"] = fmt::format("<{}{}>", i, std::string(bytes, 'x'));
      tokens.push_back(token);
    }
    return with("/added_tokens", tokens);
  };
  CHECK(added(10'000, 20) == "no error");
  CHECK_THAT(added(50, 100'000), Contains("its added tokens have more than 4194304 bytes"));
}

TEST_CASE("a text that is too long to be tokenized at once is refused") {
  const TempFolder folder;
  tiny_tokenizer(folder.path());
  const Tokenizer tokenizer = Tokenizer::open(folder.path());
  const std::string text(longest_text + 1, 'a'), invalid(longest_text / 2, '\xff');
  const std::vector<std::string_view> batch{"a", text};
  const std::string says = "a text of 8388609 bytes is too long, at most 8388608 are tokenized at once";
  CHECK_THROWS_WITH(tokenizer.encode(text), Contains(says));
  CHECK_THROWS_WITH(tokenizer.encode_batch(batch), Contains(says));
  CHECK_THROWS_WITH(tokenizer.encode(invalid), Contains("a text of 12582912 bytes is too long"));
  write_file(folder / "f.txt", "ab\n" + text);
  const RunResult result = run({"tokenize", folder.path().string(), "--file", (folder / "f.txt").string()});
  CHECK(result.exit == 1);
  CHECK_THAT(result.err, Contains("f.txt: has a line of more than 8388608 bytes; split it"));
}

TEST_CASE("memory that Rust cannot have ends the program with one line and exit code 1") {
  if (has_address_sanitizer()) {
    fmt::print("SKIPPED: the address sanitizer's own maps exceed any limit of memory\n");
    return;
  }
  const Pack pack;
  Json json = tokenizer_json(pack.folder / "m");
  json.erase("pre_tokenizer");  // the regular expressions are C, which reports it when it gets no memory
  write_file(pack.folder / "m/tokenizer.json", to_text(json));
  write_file(pack.folder / "f.txt", std::string(longest_stretch, 'a'));
  const RunResult result = run({"-q", "data", "pack", (pack.folder / "f.txt").string(), "--model",
                                (pack.folder / "m").string(), "--out", (pack.folder / "out/f.tokens").string()},
                               [] {
                                 const rlimit limit{500'000'000, 500'000'000};
                                 ::setrlimit(RLIMIT_DATA, &limit);
                               });
  CHECK(result.exit == 1);
  CHECK_THAT(result.err, Contains("error: [memory] out of memory (") && Contains(" bytes asked for); close other"));
  CHECK(lines_of(result.err).size() == 1);
  CHECK_FALSE(fs::exists(pack.folder / "out/f.tokens"));
}

TEST_CASE("a text file is read whole up to a limit") {
  const TempFolder folder;
  write_file(folder / "f", "12345");
  CHECK(read_text(folder / "f") == "12345");
  CHECK(read_text(folder / "f", 5) == "12345");
  CHECK_THROWS_WITH(read_text(folder / "f", 4), Contains("f: has more than 4 bytes, the limit for such a file"));
  write_file(folder / "empty", "");
  CHECK(read_text(folder / "empty").empty());
  fs::resize_file(folder / "f", largest_text + 1);
  CHECK_THROWS_WITH(read_text(folder / "f"), Contains("has more than 134217728 bytes"));
  CHECK_FALSE(read_text("/proc/self/status").empty());  // the system says that it has no bytes
  CHECK_THROWS_WITH(read_text(folder / "none"), Contains("opening failed: No such file"));
}

TEST_CASE("folders, named pipes and devices where a file should be are refused before they are opened") {
  const TinyModel model;
  const fs::path pipe = model.folder / "pipe.txt", folder = model.folder / "folder.txt";
  REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
  fs::create_directory(folder);
  for (const auto& [path, kind] :
       {std::pair{pipe, "a named pipe"}, std::pair{folder, "a folder"}, std::pair{fs::path("/dev/zero"), "a device"}}) {
    CAPTURE(path);
    const auto says = Contains(fmt::format("{}: is not a regular file but {}", path.string(), kind));
    CHECK_THROWS_WITH(read_text(path), says);
    CHECK_THROWS_WITH(MappedFile::open(path), says);
    CHECK_THROWS_WITH(open_regular(path), says);
    CHECK_THROWS_WITH(TextStream(TextFile{path}), says);
    CHECK_THROWS_WITH(TokenFile::open(path), says);
    for (const std::vector<std::string>& words : std::vector<std::vector<std::string>>{
             {"generate", model.path(), "--prompt-file", path.string()},
             {"logits", model.path(), "--tokens-file", path.string(), "--out", model.out()},
             {"tokenize", model.path(), "--file", path.string()},
             {"data", "show", path.string()}}) {
      const RunResult result = run(words);
      CAPTURE(words, result.err);
      CHECK(result.exit == 1);
      CHECK_THAT(result.err, says);
      CHECK_FALSE(fs::exists(model.out()));
    }
  }
  const RunResult trained = run({"train", pipe.string()});
  CHECK(trained.exit == 1);
  CHECK_THAT(trained.err, Contains("pipe.txt: is not a regular file but a named pipe"));
  const RunResult packed = run({"data", "pack", pipe.string(), "--model", model.path(), "--out", model.out()});
  CHECK(packed.exit == 1);
  CHECK_THAT(packed.err, Contains("pipe.txt: is neither a file nor a folder"));
  fs::rename(pipe, model.folder / "pipe.gguf");
  const RunResult imported = run({"import", (model.folder / "pipe.gguf").string(), "--out", model.out()});
  CHECK(imported.exit == 1);
  CHECK_THAT(imported.err, Contains("is not a regular file but a named pipe"));
  fs::remove(model / "tokenizer.json");
  fs::rename(model.folder / "pipe.gguf", model / "tokenizer.json");
  const RunResult tokenized = run({"generate", model.path(), "--prompt", "ab"});
  CHECK(tokenized.exit == 1);
  CHECK_THAT(tokenized.err, Contains("tokenizer.json: is not a regular file but a named pipe"));
}

TEST_CASE("a pipe that the shell hands over is read to its end") {
  const TinyModel model;
  const auto piped = [&](const std::vector<std::string>& words) {
    int ends[2];
    REQUIRE(::pipe(ends) == 0);
    REQUIRE(::write(ends[1], "1,2", 3) == 3);
    ::close(ends[1]);
    const RunResult result = run(words, [&] { ::dup2(ends[0], STDIN_FILENO); });
    ::close(ends[0]);
    return result;
  };
  for (const char* path : {"/dev/stdin", "/dev/fd/0", "/proc/self/fd/0"}) {
    CAPTURE(path);
    const RunResult result = piped({"logits", model.path(), "--tokens-file", path, "--out", model.out(), "--force"});
    CHECK(result.err.empty());
    CHECK(result.exit == 0);
    CHECK(lines_of(piped({"tokenize", model.path(), "--file", path}).out).size() == 1);
  }
}

}  // namespace limits_test
