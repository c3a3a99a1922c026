// Packing text: the commands `data pack` and `data show`.
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>

#include <random>

#include "catch.h"
#include "core/json.h"
#include "core/log.h"
#include "data/pack.h"
#include "data/token_file.h"
#include "hf/tokenizer.h"
#include "sample_texts.h"
#include "support.h"
#include "token_files.h"

namespace data_test {

using namespace tapetune;
using namespace tapetune::test;
using namespace tapetune::test::token_files;
namespace fs = std::filesystem;

namespace {

std::string gzipped(const std::string& text) {
  z_stream stream{};
  REQUIRE(::deflateInit2(&stream, 6, Z_DEFLATED, MAX_WBITS + 16, 8, Z_DEFAULT_STRATEGY) == Z_OK);
  std::string out(::deflateBound(&stream, text.size()) + 64, '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  stream.avail_in = static_cast<uInt>(text.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  REQUIRE(::deflate(&stream, Z_FINISH) == Z_STREAM_END);
  out.resize(stream.total_out);
  ::deflateEnd(&stream);
  return out;
}

std::string zstd_packed(const std::string& text) {
  std::string out(::ZSTD_compressBound(text.size()), '\0');
  out.resize(::ZSTD_compress(out.data(), out.size(), text.data(), text.size(), 3));
  return out;
}

struct Packing {
  Packing() {
    set_quiet(true);
    fs::create_directories(folder / "m");
    tiny_tokenizer(folder / "m");
    options.model = folder / "m";
    options.out = folder / "out.tokens";
    options.replace = true;
  }
  // The ids of what is packed from files below the folder.
  TokenIds pack_all(const std::vector<std::string>& inputs) {
    options.inputs.clear();
    for (const std::string& input : inputs) options.inputs.push_back((folder / input).string());
    packed = pack(options);
    return all_of(TokenFile::open(options.out));
  }
  TokenIds ids(const std::string& text) const { return Tokenizer::open(options.model).encode(text, false); }
  ~Packing() { set_quiet(false); }
  TempFolder folder;
  PackOptions options;
  Packed packed;
};

TokenIds joined(const std::vector<TokenIds>& parts) {
  TokenIds ids;
  for (const TokenIds& part : parts) ids.insert(ids.end(), part.begin(), part.end());
  return ids;
}

}  // namespace

TEST_CASE("documents of all kinds of files are packed in order, with BOS and EOS") {
  Packing p;
  const TokenIds ab = p.ids("ab"), c = p.ids("c"), d = p.ids("d e"), bos{1}, eos{2};
  write_file(p.folder / "1.txt", "ab");
  CHECK(p.pack_all({"1.txt"}) == joined({bos, ab, eos}));
  CHECK(p.packed.info.documents == 1);
  CHECK(p.packed.info.bos == 1);
  write_file(p.folder / "2.jsonl", "{\"text\": \"c\"}\n\n{\"id\": {\"text\": 1}, \"text\": \"d e\", \"more\": [1]}");
  CHECK(p.pack_all({"2.jsonl", "1.txt"}) == joined({bos, c, eos, bos, d, eos, bos, ab, eos}));
  fs::create_directories(p.folder / "texts" / "below");
  write_file(p.folder / "texts" / "b.txt.gz", gzipped("a") + gzipped("b"));  // two members are one text
  write_file(p.folder / "texts" / "below" / "a.jsonl.zst",
             zstd_packed("{\"text\": \"c\"}\n") + zstd_packed("{\"text\": \"d e\"}\n"));
  write_file(p.folder / "texts" / "z.txt.zst", zstd_packed("c"));
  write_file(p.folder / "texts" / "a.jsonl.gz", gzipped("{\"text\": \"c\"}"));
  write_file(p.folder / "texts" / "notes.md", "not packed");
  CHECK(p.pack_all({"texts"}) == joined({bos, c, eos, bos, ab, eos, bos, c, eos, bos, d, eos, bos, c, eos}));
  CHECK(p.pack_all({"texts/*.txt.*", "?.txt"}) == joined({bos, ab, eos, bos, c, eos, bos, ab, eos}));

  p.options.format.key = "content";
  write_file(p.folder / "3.jsonl", "{\"text\": \"x\", \"content\": \"c\"}\n");
  CHECK(p.pack_all({"3.jsonl"}) == joined({bos, c, eos}));
  p.options.bos = Frame::never;
  CHECK(p.pack_all({"3.jsonl"}) == joined({c, eos}));
  // Bytes that are no UTF-8, and halves of characters as Python lets them through.
  write_file(p.folder / "4.jsonl", "{\"content\": \"\xff\\ud83d\\ude00\\\\ud83d\\udc00 \\ud83d\"}");
  CHECK(p.pack_all({"4.jsonl"}) == joined({p.ids("\ufffd\U0001f600\\ud83d\ufffd \ufffd"), eos}));
  p.options.eos = Frame::never;
  CHECK(p.pack_all({"3.jsonl"}) == c);
  CHECK_FALSE(p.packed.info.eos);

  // auto: a BOS only where the checkpoint puts one; always: wherever there is such a token.
  write_file(p.folder / "m" / "tokenizer_config.json", R"({"bos_token": "<s>", "add_bos_token": false})");
  p.options.bos = p.options.eos = Frame::automatic;
  CHECK(p.pack_all({"3.jsonl"}) == c);
  p.options.bos = Frame::always;
  CHECK(p.pack_all({"3.jsonl"}) == joined({bos, c}));
  p.options.eos = Frame::always;
  CHECK_THROWS_WITH(p.pack_all({"3.jsonl"}), Contains("names no eos token"));
}

TEST_CASE("a delimiter splits a text, also across blocks, and --strip trims what it leaves") {
  Packing p;
  p.options.bos = p.options.eos = Frame::never;
  p.options.format.delimiter = "<|end|>";
  std::string text, plain;
  std::int64_t documents = 0;
  std::mt19937 random(1);
  while (text.size() < 800'000) {  // many blocks, of which some end within a delimiter
    const std::string document = "\n " + random_text(random() % 3000, random()) + "x\n";
    text += document + p.options.format.delimiter;
    plain += document;
    ++documents;
  }
  text += p.options.format.delimiter + "\n \n" + p.options.format.delimiter;  // an empty one, and one of white space
  write_file(p.folder / "f.txt", text);
  const TokenIds ids = p.pack_all({"f.txt"});
  CHECK(p.packed.info.documents == documents + 1);
  const TokenFile file = TokenFile::open(p.options.out);
  const Tokenizer tokenizer = Tokenizer::open(p.options.model);
  std::size_t begin = 0;
  for (std::int64_t i = 0; i < documents; ++i) {
    const std::size_t end = text.find(p.options.format.delimiter, begin);
    const auto [first, last] = file.document(i);
    TokenIds found(static_cast<std::size_t>(last - first));
    file.read(first, found);
    REQUIRE(found == tokenizer.encode(std::string_view(text).substr(begin, end - begin), false));
    begin = end + p.options.format.delimiter.size();
  }
  p.options.strip = true;
  p.pack_all({"f.txt"});
  CHECK(p.packed.info.documents == documents);
  const TokenFile stripped = TokenFile::open(p.options.out);
  const auto [first, last] = stripped.document(0);
  TokenIds found(static_cast<std::size_t>(last - first));
  stripped.read(first, found);
  std::string trimmed = text.substr(0, text.find(p.options.format.delimiter));
  trimmed.erase(0, trimmed.find_first_not_of(" \t\r\n"));
  trimmed.erase(trimmed.find_last_not_of(" \t\r\n") + 1);
  CHECK(found == tokenizer.encode(trimmed, false));
}

TEST_CASE("a long text is packed in parts with the ids of the whole, whatever the number of threads") {
  Packing p;
  p.options.bos = p.options.eos = Frame::never;
  for (const auto& make : {tiny_tokenizer, sentence_tokenizer}) {
    make(p.options.model);
    const std::string text = random_text(600'000, 9) + std::string(150'000, 'a') + " the";
    write_file(p.folder / "f.txt", text);
    const TokenIds whole = p.ids(text);
    for (const int threads : {1, 3}) {
      p.options.threads = threads;
      CHECK(p.pack_all({"f.txt"}) == whole);
    }
    p.options.strip = true;
    CHECK(p.pack_all({"f.txt"}).size() <= whole.size());
    p.options.strip = false;
  }
}

TEST_CASE("text that cannot be packed is refused with the file, the line and the remedy") {
  Packing p;
  p.options.replace = false;
  const auto refused = [&](const std::string& name, const std::string& text, const std::string& why) {
    write_file(p.folder / name, text);
    CAPTURE(name, text);
    CHECK_THROWS_WITH(p.pack_all({name}), Contains(why) && Contains(name));
    CHECK_FALSE(fs::exists(p.options.out));
    fs::remove(p.folder / name);
    CHECK(files_in(p.folder.path()) == 1);  // the model
  };
  refused("f.txt", "", "there is no text");
  refused("f.txt.gz", "", "there is no text");
  refused("f.jsonl", "\n\n", "there is no text");
  refused("f.pdf", "x", "cannot be packed");
  refused("f.gz", "x", "cannot be packed");
  refused("f.jsonl", "{\"text\": \"a\"}\n{\"text\": \"a\"", "line 2 is not JSON");
  refused("f.jsonl", "{\"text\": \"a\"}\n\nplain text\n", "line 3 is not JSON");
  refused("f.jsonl", "{\"text\": \"a\"} {\"text\": \"b\"}\n", "line 1 is not JSON");
  refused("f.jsonl", "{\"text\": \"a\"}\n{\"content\": \"a\"}\n", "line 2 has no key \"text\"");
  refused("f.jsonl", "{\"meta\": {\"text\": \"a\"}}\n", "line 1 has no key \"text\"");
  refused("f.jsonl", "[\"text\"]\n", "line 1 has no key \"text\"");
  refused("f.jsonl", "{\"text\": 3}\n", "line 1 has a \"text\" that is not text");
  refused("f.jsonl", "{\"text\": [\"a\"]}\n", "line 1 has a \"text\" that is not text");
  refused("f.jsonl", std::string(200'000, '['), "line 1 is not JSON");
  refused("f.txt.gz", "this is no gzip", "is damaged near byte");
  refused("f.txt.zst", "this is no zstd", "is damaged near byte");
  const std::string random = random_text(200'000, 3), gzip = gzipped(random), zstd = zstd_packed(random);
  refused("f.txt.gz", gzip.substr(0, gzip.size() / 2), "it ends early");
  refused("f.txt.zst", zstd.substr(0, zstd.size() / 2), "it ends early");
  std::string flipped = gzip;
  flipped[flipped.size() - 6] ^= 0x55;  // of the checksum
  refused("f.txt.gz", flipped, "is damaged near byte");
  CHECK_THROWS_WITH(p.pack_all({"none.txt"}), Contains("is neither a file nor a folder"));
  CHECK_THROWS_WITH(p.pack_all({"*.txt"}), Contains("matches no file"));
  CHECK_THROWS_WITH(p.pack_all({"m"}), Contains("contains no .txt or .jsonl"));
  write_file(p.folder / "f.txt", "a");
  p.pack_all({"f.txt"});
  CHECK_THROWS_WITH(p.pack_all({"f.txt"}), Contains("already exists") && Contains("--force"));
  if (::geteuid() != 0) {  // root reads everything
    fs::permissions(p.folder / "f.txt", fs::perms::none);
    p.options.replace = true;
    CHECK_THROWS_WITH(p.pack_all({"f.txt"}), Contains("opening failed: Permission denied; check the permissions"));
  }
}

TEST_CASE("data pack: files of a folder that were not packed are counted by kind") {
  const TempFolder folder;
  fs::create_directories(folder / "m");
  tiny_tokenizer(folder / "m");
  fs::create_directories(folder / "books/more");
  for (const char* name : {"a.txt", "b.pdf", "more/c.pdf", "more/d.epub", "README", ".hidden"}) {
    write_file(folder.path() / "books" / name, "some text");
  }
  const RunResult packed = run({"data", "pack", (folder / "books").string(), "--model", (folder / "m").string(),
                                "--out", (folder / "f.tokens").string()});
  CHECK(packed.exit == 0);
  CHECK_THAT(packed.out, Contains("in 1 document, from 1 file of 9 bytes"));
  CHECK_THAT(packed.err, Contains("4 files in the folders were not packed: 1 .epub, 2 .pdf, 1 without extension"));
}

TEST_CASE("data pack and data show: text to tokens and back") {
  const TempFolder folder;
  fs::create_directory(folder / "m");
  tiny_tokenizer(folder / "m");
  const std::string model = (folder / "m").string(), out = (folder / "f.tokens").string();
  write_file(folder / "a.txt", "the first\\nthe second\\nthe \xff third");
  const RunResult packed =
      run({"data", "pack", (folder / "a.txt").string(), "--model", model, "--out", out, "--delimiter", "\\\\n"});
  CHECK(packed.exit == 0);
  CHECK_THAT(packed.out, Contains("tokens of 16 bits in 3 documents, from 1 file of "));
  CHECK_THAT(packed.err, Contains("1 part of the text replaced by U+FFFD"));
  const RunResult shown = run({"data", "show", out, "--model", model, "--documents", "5"});
  CHECK(shown.exit == 0);
  CHECK_THAT(shown.out, Contains("--- document 0, 11 tokens\nthe first\n--- document 1, 12 tokens\nthe second\n"));
  CHECK(run({"data", "show", out, "--model", model, "--from", "1"}).out == "--- document 1, 12 tokens\nthe second\n");
  const Json header = from_text(run({"data", "show", out, "--json"}).out);
  CHECK(header["documents"] == 3);
  CHECK(header["bos"] == 1);
  CHECK(header["vocabulary"] == 61);

  CHECK(run({"data", "pack", (folder / "a.txt").string(), "--model", model, "--out", out}).exit == 1);
  CHECK(run({"data", "pack", (folder / "a.txt").string(), "--model", model, "--out", out, "--force"}).exit == 0);
  CHECK(run({"data", "show", out, "--model", model, "--from", "1"}).exit == 1);
  CHECK_THAT(run({"data", "show", out}).err, Contains("give --model"));
  write_file(folder / "raw.bin", std::string("\x08\x00\x02\x00\x09\x00\x09\x00", 8));
  CHECK(run({"data", "show", (folder / "raw.bin").string(), "--raw", "--model", model, "--from", "1"}).out ==
        "--- document 1, 2 tokens\nbb\n");
  sentence_tokenizer(folder / "m");
  const RunResult other = run({"data", "show", out, "--model", model});
  CHECK(other.exit == 1);
  CHECK_THAT(other.err, Contains("was packed with another tokenizer"));
  for (const char* verb : {"pack", "show"}) {
    const RunResult help = run({"data", verb, "--help"});
    CHECK(help.exit == 0);
    CHECK_THAT(help.out, Contains("example: tapetune data " + std::string(verb)));
    CHECK(run({"data", verb, "--no-such-option"}).exit == 2);
  }
  CHECK(run({"data", "pack", "x.txt", "--model", model, "--out", out, "--bos", "perhaps"}).exit == 2);
}

TEST_CASE("a line of 100 MB in a .jsonl is packed") {
  const TempFolder folder;
  fs::create_directory(folder / "m");
  tiny_tokenizer(folder / "m");
  std::string line = "{\"text\": \"";
  while (line.size() < 100'000'000) line += "several words that come again and again ";
  write_file(folder / "f.jsonl", "{\"text\": \"a\"}\n" + line + "\"}\n{\"text\": \"b\"}\n");
  const RunResult packed = run({"data", "pack", (folder / "f.jsonl").string(), "--model", (folder / "m").string(),
                                "--out", (folder / "o").string()});
  CHECK(packed.exit == 0);
  CHECK(packed.err.find("error") == std::string::npos);
  CHECK_THAT(packed.out, Contains("in 3 documents"));
  const TokenFile file = TokenFile::open(folder / "o");
  CHECK(file.document(1).second - file.document(1).first == static_cast<std::int64_t>(line.size() - 10 + 2));
}

TEST_CASE("data pack that is killed leaves nothing under the final name, and the next one clears up") {
  const TempFolder folder;
  fs::create_directories(folder / "m");
  fs::create_directories(folder / "out");
  tiny_tokenizer(folder / "m");
  write_file(folder / "f.txt", random_text(8'000'000, 1));
  const std::string text = (folder / "f.txt").string(), model = (folder / "m").string(),
                    out = (folder / "out" / "f.tokens").string();
  const auto start_and = [&](int signal) {
    const auto before = contents(folder / "out");
    const pid_t child = start({"-q", "data", "pack", text, "--model", model, "--out", out});
    const auto begun = [&] {  // some tokens are on disk
      std::error_code status;
      for (const auto& entry : fs::directory_iterator(folder / "out", status)) {
        const std::string name = entry.path().filename().string();
        if (!before.contains(name) && entry.file_size(status) > 1000 && !status) return true;
      }
      return false;
    };
    const auto ended = [&] {
      siginfo_t info{};
      return ::waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == child;
    };
    for (int i = 0; i < 60'000 && !begun() && !ended(); ++i) ::usleep(1000);
    CHECK(begun());
    ::kill(child, signal);
    int status = 0;
    ::waitpid(child, &status, 0);
    return status;
  };
  CHECK(WIFSIGNALED(start_and(SIGKILL)));
  CHECK_FALSE(fs::exists(out));
  CHECK(files_in(folder / "out") == 1);
  const int status = start_and(SIGINT);  // a polite end leaves nothing at all
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 3);
  CHECK(fs::is_empty(folder / "out"));
  CHECK(WIFSIGNALED(start_and(SIGKILL)));
  write_file(text, "short");
  CHECK(run({"data", "pack", text, "--model", model, "--out", out}).exit == 0);
  CHECK(files_in(folder / "out") == 1);
  CHECK(TokenFile::open(out).size() == 7);
}

TEST_CASE("data pack on a full disk says so and leaves nothing") {
  const TempFolder folder;
  fs::create_directories(folder / "m");
  fs::create_directories(folder / "out");
  tiny_tokenizer(folder / "m");
  write_file(folder / "f.txt", random_text(1'500'000, 1));
  const RunResult limited = run({"-q", "data", "pack", (folder / "f.txt").string(), "--model", (folder / "m").string(),
                                 "--out", (folder / "out" / "f.tokens").string()},
                                [] {
                                  const rlimit limit{1'000'000, 1'000'000};
                                  ::setrlimit(RLIMIT_FSIZE, &limit);
                                });
  CHECK(limited.exit == 1);
  CHECK_THAT(limited.err, Contains("writing failed"));
  CHECK(fs::is_empty(folder / "out"));
}

}  // namespace data_test
