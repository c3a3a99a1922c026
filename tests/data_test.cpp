// Token files, packing and the order of windows; the verbs `data pack` and `data show`.
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <set>

#include "catch.h"
#include "core/error.h"
#include "core/json.h"
#include "core/log.h"
#include "data/batches.h"
#include "data/encoder.h"
#include "data/pack.h"
#include "data/token_file.h"
#include "data/utf8.h"
#include "data/vocabulary.h"
#include "support.h"

namespace data_test {

using namespace tapetune;
using namespace tapetune::test;
namespace fs = std::filesystem;

namespace {

TokenFileInfo settings(std::int64_t vocabulary) {
  TokenFileInfo info;
  info.vocabulary_size = vocabulary;
  info.vocabulary_hash = 7;
  return info;
}

// A file of the tokens first, first + 1, …, as one document.
TokenFile counting_file(const fs::path& path, std::int64_t tokens, std::uint32_t first = 0) {
  TokenFileWriter writer(path, true, settings(1 << 20));
  for (std::uint32_t i = 0; i < tokens; ++i) writer.append(first + i);
  writer.end_document();
  writer.commit();
  return TokenFile::open(path);
}

TokenIds all_of(const TokenFile& file) {
  TokenIds ids(static_cast<std::size_t>(file.size()));
  file.read(0, ids);
  return ids;
}

std::size_t files_in(const fs::path& folder) {
  return static_cast<std::size_t>(std::distance(fs::directory_iterator(folder), fs::directory_iterator()));
}

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

// As Llama 2: no pre-tokenizer, "▁" for spaces and one before every text, bytes for what is unknown.
void sentence_tokenizer(const fs::path& folder) {
  Json vocab, merges = Json::array();
  for (const char* token : {"<unk>", "<s>", "</s>"}) vocab[token] = vocab.size();
  for (int byte = 0; byte < 256; ++byte) vocab[fmt::format("<0x{:02X}>", byte)] = vocab.size();
  vocab["▁"] = vocab.size();
  for (char c = 'a'; c <= 'z'; ++c) vocab[std::string(1, c)] = vocab.size();
  for (const char* c : {".", ",", "é"}) vocab[c] = vocab.size();
  const auto merge = [&](const std::string& a, const std::string& b) {
    merges.push_back(a + " " + b);
    vocab[a + b] = vocab.size();
  };
  for (const auto& [a, b] : std::vector<std::pair<std::string, std::string>>{
           {"t", "h"}, {"th", "e"}, {"▁", "the"}, {"▁", "▁"}, {"▁", "a"}, {"a", "n"}, {"▁a", "n"}, {".", "."}})
    merge(a, b);
  merge(",", "▁");  // a comma may take the space after it: no place to cut
  const auto special = [](int id, const char* text) {
    return Json{{"id", id},        {"content", text},     {"single_word", false}, {"lstrip", false},
                {"rstrip", false}, {"normalized", false}, {"special", true}};
  };
  Json tokenizer;
  tokenizer["version"] = "1.0";
  tokenizer["added_tokens"] = {special(0, "<unk>"), special(1, "<s>"), special(2, "</s>")};
  tokenizer["normalizer"] = from_text(
      R"({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"},
          {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]})");
  tokenizer["model"] = {{"type", "BPE"},         {"unk_token", "<unk>"}, {"fuse_unk", true},
                        {"byte_fallback", true}, {"vocab", vocab},       {"merges", merges}};
  write_file(folder / "tokenizer.json", to_text(tokenizer));
  write_file(folder / "tokenizer_config.json", R"({"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": true})");
}

// Words, spaces, line ends, added tokens and broken bytes in any order.
std::string random_text(std::size_t size, unsigned seed) {
  const std::vector<std::string> parts{
      "the", "an", "a",    " ",    " ", " ", " ",    "  ",   "\n",           "\n\n",     "\r\n", "\t",
      ".",   "..", ",",    ", ",   "é", "x", "</s>", " <s>", "\xe3\x80\x80", "\xc2\xa0", "中文", "▁",
      "12",  "'s", "\xff", "\xe4", "<", ">", " the", " an",  "\r ",          "Z"};
  std::mt19937 random(seed);
  std::string text;
  while (text.size() < size) text += parts[random() % parts.size()];
  return text;
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

TEST_CASE("a token file gives back what was written, with 16 or 32 bits by the size of the vocabulary") {
  const TempFolder folder;
  for (const std::int64_t vocabulary : {1 << 16, (1 << 16) + 1}) {
    TokenFileInfo info = settings(vocabulary);
    info.bos = 1;
    TokenFileWriter writer(folder / "f", true, info);
    writer.append(std::vector<std::uint32_t>{1, 65535, 3});
    writer.end_document();
    writer.append(std::uint32_t{9});
    writer.append(static_cast<std::uint32_t>(vocabulary - 1));
    writer.end_document();
    CHECK_THROWS_WITH(writer.append(static_cast<std::uint32_t>(vocabulary)), Contains("outside of the vocabulary"));
    writer.commit();
    const TokenFile file = TokenFile::open(folder / "f");
    CHECK(file.info().token_bytes == (vocabulary == 1 << 16 ? 2 : 4));
    CHECK(file.info().vocabulary_size == vocabulary);
    CHECK(file.info().bos == 1);
    CHECK_FALSE(file.info().eos);
    CHECK(file.document(0) == std::pair<std::int64_t, std::int64_t>{0, 3});
    CHECK(file.document(1) == std::pair<std::int64_t, std::int64_t>{3, 5});
    CHECK_THROWS_WITH(file.document(2), Contains("document 2 is asked for, but it has 2"));
    TokenIds ids(3);
    file.read(2, ids);
    CHECK(ids == TokenIds{3, 9, vocabulary - 1});
    CHECK_THROWS_WITH(file.read(3, ids), Contains("tokens 3 to 6 are asked for, but it has 5"));
    CHECK_THROWS_AS(file.read(-1, ids), Error);
  }
}

TEST_CASE("a token file with more documents than are kept in memory lists them all") {
  const TempFolder folder;
  TokenFileWriter writer(folder / "f", false, settings(100));
  constexpr std::int64_t documents = 300'000;
  for (std::int64_t i = 0; i < documents; ++i) {
    writer.append(static_cast<std::uint32_t>(i % 100));
    writer.end_document();
  }
  writer.commit();
  const TokenFile file = TokenFile::open(folder / "f");
  REQUIRE(file.info().documents == documents);
  for (const std::int64_t i : {std::int64_t{0}, documents / 2, documents - 1}) CHECK(file.document(i).first == i);
  CHECK(files_in(folder.path()) == 1);
}

TEST_CASE("a token file that is not committed leaves nothing, and one that exists is refused") {
  const TempFolder folder;
  {
    TokenFileWriter writer(folder / "f", false, settings(100));
    for (int i = 0; i < 200'000; ++i) {
      writer.append(std::uint32_t{1});
      writer.end_document();
    }
    CHECK_FALSE(fs::exists(folder / "f"));
  }
  CHECK(fs::is_empty(folder.path()));
  write_file(folder / "f", "precious");
  CHECK_THROWS_WITH(TokenFileWriter(folder / "f", false, settings(100)), Contains("already exists"));
  fs::remove(folder / "f");
  TokenFileWriter writer(folder / "f", false, settings(100));
  write_file(folder / "f", "precious");  // made by another while we write
  CHECK_THROWS_AS(writer.commit(), Error);
  CHECK(read_file(folder / "f") == "precious");
}

TEST_CASE("a damaged token file is refused with what is wrong") {
  const TempFolder folder;
  counting_file(folder / "good", 100);
  const std::string good = read_file(folder / "good");
  const auto open = [&](const std::string& bytes) {
    write_file(folder / "f", bytes);
    return TokenFile::open(folder / "f");
  };
  const auto with = [&](std::size_t at, char byte) {
    std::string bytes = good;
    bytes[at] = byte;
    return bytes;
  };
  CHECK(open(good).size() == 100);
  CHECK_THROWS_WITH(open(""), Contains("is empty"));
  CHECK_THROWS_WITH(open("some text that is no token file"), Contains("is not a token file") && Contains("data pack"));
  CHECK_THROWS_WITH(open(good.substr(0, 5)), Contains("truncated within its header"));
  CHECK_THROWS_WITH(open(good.substr(0, 127)), Contains("truncated within its header"));
  CHECK_THROWS_WITH(open(good.substr(0, 200)), Contains("has 200 bytes, but its header says 536 (100 tokens"));
  CHECK_THROWS_WITH(open(good + "x"), Contains("has 537 bytes, but its header says 536"));
  CHECK_THROWS_WITH(open(with(8, 2)), Contains("is of version 2, but this tapetune reads up to 1"));
  CHECK_THROWS_WITH(open(with(12, 3)), Contains("damaged header"));
  CHECK_THROWS_WITH(open(with(39, 0x7f)), Contains("damaged header"));  // tokens
  CHECK_THROWS_WITH(open(with(47, 0x7f)), Contains("damaged header"));  // documents
  const TokenFile list = open(with(good.size() - 2, 1));
  CHECK_THROWS_WITH(list.document(0), Contains("list of documents is damaged"));
  TokenIds ids(100);
  CHECK_THROWS_WITH(open(with(128 + 7, 1)).read(0, ids), Contains("has the token 16777217, but its vocabulary has"));
  // A header is written last: without it the file is none, whatever else is there.
  CHECK_THROWS_WITH(open(std::string(128, '\0') + good.substr(128)), Contains("is not a token file"));
}

TEST_CASE("raw files are 16-bit tokens and nothing else") {
  const TempFolder folder;
  write_file(folder / "f.bin", std::string("\x01\x00\x02\x00\xff\x7f", 6));
  CHECK(all_of(TokenFile::open_raw(folder / "f.bin")) == TokenIds{1, 2, 32767});
  CHECK_THROWS_WITH(all_of(TokenFile::open_raw(folder / "f.bin", 32000)), Contains("has the token 32767, but its"));
  CHECK_THROWS_WITH(TokenFile::open(folder / "f.bin"), Contains("--raw"));
  write_file(folder / "odd", "abc");
  CHECK_THROWS_WITH(TokenFile::open_raw(folder / "odd"), Contains("3 bytes, which is not a multiple of two"));
  counting_file(folder / "packed", 10);
  CHECK_THROWS_WITH(TokenFile::open_raw(folder / "packed"), Contains("drop --raw"));
}

TEST_CASE("a token file knows the tokenizer that it was packed with") {
  const TempFolder folder;
  tiny_tokenizer(folder.path());
  const Vocabulary tiny = read_vocabulary(folder.path());
  CHECK(tiny.size == 61);
  CHECK(tiny.size == Tokenizer::open(folder.path()).size());
  CHECK(tiny.hash == 0xb7e83e3a84b1bdc1);  // the same on every machine, and in every version
  Json json = from_text(read_file(folder / "tokenizer.json"));
  json["post_processor"] = nullptr;  // not of the vocabulary
  write_file(folder / "tokenizer.json", to_text(json, 2));
  CHECK(read_vocabulary(folder.path()).hash == tiny.hash);
  std::swap(json["model"]["vocab"]["a"], json["model"]["vocab"]["b"]);
  write_file(folder / "tokenizer.json", to_text(json));
  const Vocabulary other = read_vocabulary(folder.path());
  CHECK(other.hash != tiny.hash);

  TokenFileInfo info = settings(tiny.size);
  info.vocabulary_hash = tiny.hash;
  TokenFileWriter writer(folder / "f", false, info);
  writer.append(std::uint32_t{1});
  writer.commit();
  const TokenFile file = TokenFile::open(folder / "f");
  file.require_vocabulary(tiny);
  CHECK_THROWS_WITH(file.require_vocabulary(other), Contains("was packed with another tokenizer"));
}

TEST_CASE("a permutation is a bijection for every length, and keys give different ones") {
  for (std::uint64_t n = 1; n < 600; ++n) {
    const Permutation order(n, n * 31);
    std::vector<bool> seen(n);
    for (std::uint64_t i = 0; i < n; ++i) {
      const std::uint64_t at = order(i);
      REQUIRE(at < n);
      REQUIRE_FALSE(seen[at]);
      seen[at] = true;
    }
  }
  for (const std::uint64_t n : {std::uint64_t{65536}, std::uint64_t{65537}, std::uint64_t{1'000'003}}) {
    const Permutation order(n, 5);
    std::vector<bool> seen(n);
    for (std::uint64_t i = 0; i < n; ++i) seen[order(i)] = true;
    CHECK(std::ranges::count(seen, true) == static_cast<std::ptrdiff_t>(n));
  }
  const std::uint64_t huge = std::uint64_t{1} << 41;
  std::set<std::uint64_t> seen;
  for (std::uint64_t i = 0; i < 1000; ++i) seen.insert(Permutation(huge, 1)(i));
  CHECK(seen.size() == 1000);
  CHECK(*seen.rbegin() < huge);
  CHECK(*seen.rbegin() > huge / 2);  // they are spread

  // All six orders of three come about equally often.
  std::map<std::array<std::uint64_t, 3>, int> orders;
  for (std::uint64_t key = 0; key < 6000; ++key) {
    const Permutation order(3, key);
    ++orders[{order(0), order(1), order(2)}];
  }
  CHECK(orders.size() == 6);
  for (const auto& [order, count] : orders) CHECK((count > 850 && count < 1150));
}

TEST_CASE("every window comes once an epoch, in another order each time, which the seed decides") {
  const TempFolder folder;
  const TokenFile file = counting_file(folder / "f", 1005);
  const auto order = [&](std::uint64_t seed, std::int64_t from) {
    const Batches batches({{file, {}}}, {.context = 10, .seed = seed});
    REQUIRE(batches.windows() == 100);
    std::vector<std::int64_t> firsts;
    for (std::int64_t i = from; i < from + 100; ++i) {
      const TokenIds window = batches.window(i);
      REQUIRE(window.size() == 11);
      for (std::size_t t = 1; t < window.size(); ++t) REQUIRE(window[t] == window[0] + static_cast<std::int64_t>(t));
      CHECK(batches.place(i).epoch == i / 100);
      firsts.push_back(window[0]);
    }
    return firsts;
  };
  const auto first = order(1, 0), second = order(1, 100);
  CHECK(first != second);
  CHECK(first == order(1, 0));
  CHECK(first != order(2, 0));
  for (std::vector<std::int64_t> sorted : {first, second}) {
    CHECK_FALSE(std::ranges::is_sorted(sorted));
    std::ranges::sort(sorted);
    for (std::int64_t i = 0; i < 100; ++i) CHECK(sorted[static_cast<std::size_t>(i)] == 10 * i);
  }
}

TEST_CASE("files are drawn in proportion to their weights at every moment") {
  const TempFolder folder;
  const TokenFile a = counting_file(folder / "a", 101), b = counting_file(folder / "b", 501, 1000),
                  c = counting_file(folder / "c", 31, 5000);
  for (const std::array<double, 3>& weights : {std::array{0.7, 0.2, 0.1}, std::array{1.0, 1.0, 1.0},
                                               std::array{5.0, 1000.0, 0.5}, std::array{3.0, 1.0, 3.0}}) {
    const Batches batches({{a, weights[0]}, {b, weights[1]}, {c, weights[2]}}, {.context = 10, .seed = 3});
    const double sum = weights[0] + weights[1] + weights[2];
    std::array<std::int64_t, 3> counts{};
    std::array<std::vector<std::int64_t>, 3> windows;
    for (std::int64_t i = 0; i < 5000; ++i) {
      const Batches::Place place = batches.place(i);
      ++counts[place.file];
      windows[place.file].push_back(place.window);
      for (std::size_t f = 0; f < 3; ++f) {
        REQUIRE(std::abs(static_cast<double>(counts[f]) - weights[f] / sum * static_cast<double>(i + 1)) < 1.5);
      }
    }
    // Of each file, all windows come before one comes again.
    for (std::size_t f = 0; f < 3; ++f) {
      const std::size_t n = std::array<std::size_t, 3>{10, 50, 3}[f];
      for (std::size_t begin = 0; begin + n <= windows[f].size(); begin += n) {
        const auto first = windows[f].begin() + static_cast<std::ptrdiff_t>(begin);
        REQUIRE(std::set(first, first + static_cast<std::ptrdiff_t>(n)).size() == n);
      }
    }
    CHECK(batches.place(1'000'000'000'000).window >= 0);  // without those before it
  }
}

TEST_CASE("files without weights are mixed evenly, and each window comes once an epoch") {
  const TempFolder folder;
  const Batches batches({{counting_file(folder / "a", 101), {}}, {counting_file(folder / "b", 501, 1000), {}}},
                        {.context = 10});
  REQUIRE(batches.windows() == 60);
  for (std::int64_t epoch = 0; epoch < 3; ++epoch) {
    std::set<std::int64_t> seen;
    for (std::int64_t i = 0; i < 60; ++i) seen.insert(batches.window(60 * epoch + i)[0]);
    CHECK(seen.size() == 60);
  }
  const TokenFile a = TokenFile::open(folder / "a");
  CHECK_THROWS_WITH(Batches({{a, 1.0}, {a, {}}}, {.context = 10}), Contains("some have none"));
  CHECK_THROWS_WITH(Batches({{a, 0.0}}, {.context = 10}), Contains("its weight is 0, but must be above 0"));
}

TEST_CASE("held-out windows are never trained on, and no seed changes which they are") {
  const TempFolder folder;
  const TokenFile a = counting_file(folder / "a", 1001), b = counting_file(folder / "b", 301, 5000);
  for (const HeldOut from : {HeldOut::last, HeldOut::scattered}) {
    std::set<std::int64_t> kept[2];
    for (const std::uint64_t seed : {1, 2}) {
      const Batches batches({{a, {}}, {b, {}}}, {.context = 10, .seed = seed, .held_out = 0.1, .held_out_from = from});
      REQUIRE(batches.held_out() == 13);
      REQUIRE(batches.windows() == 117);
      std::set<std::int64_t> targets, trained;
      for (std::int64_t i = 0; i < 13; ++i) {
        const TokenIds window = batches.held_out_window(i);
        kept[seed - 1].insert(window[0]);
        targets.insert(window.begin() + 1, window.end());
      }
      CHECK(kept[seed - 1].size() == 13);
      for (std::int64_t i = 0; i < 3 * 117; ++i) {
        const TokenIds window = batches.window(i);
        trained.insert(window[0]);
        for (std::size_t t = 1; t < window.size(); ++t) REQUIRE_FALSE(targets.contains(window[t]));
      }
      CHECK(trained.size() == 117);
      CHECK_THROWS_WITH(batches.held_out_window(13), Contains("held-out window 13 is asked for, but there are 13"));
    }
    CHECK(kept[0] == kept[1]);
    CHECK(kept[0].contains(900) == (from == HeldOut::last));
  }
  CHECK_THROWS_WITH(Batches({{a, {}}}, {.context = 1000, .held_out = 0.1}), Contains("leaves none to train on"));
  CHECK_THROWS_WITH(Batches({{a, {}}}, {.context = 10, .held_out = 1.0}), Contains("must be at least 0 and below 1"));
}

TEST_CASE("a restored position goes on exactly, and that of other data is refused") {
  const TempFolder folder;
  const TokenFile a = counting_file(folder / "a", 1001), b = counting_file(folder / "b", 501, 5000);
  const BatchSettings settings{.context = 10, .seed = 4, .held_out = 0.05};
  Batches whole({{a, 2.0}, {b, 1.0}}, settings);
  std::vector<TokenIds> windows;
  for (int i = 0; i < 400; ++i) windows.push_back(whole.next());
  for (const std::size_t stop : {0U, 1U, 57U, 144U, 399U}) {
    Batches before({{a, 2.0}, {b, 1.0}}, settings);
    before.skip(static_cast<std::int64_t>(stop));
    const Json state = from_text(to_text(before.state()));
    Batches after({{a, 2.0}, {b, 1.0}}, settings);
    after.restore(state);
    CHECK(after.position() == static_cast<std::int64_t>(stop));
    for (std::size_t i = stop; i < windows.size(); ++i) REQUIRE(after.next() == windows[i]);
  }
  const Json state = whole.state();
  CHECK_THROWS_WITH(Batches({{a, 1.0}, {b, 1.0}}, settings).restore(state), Contains("other data: weights"));
  CHECK_THROWS_WITH(Batches({{b, 2.0}, {a, 1.0}}, settings).restore(state), Contains("other data: tokens"));
  CHECK_THROWS_WITH(Batches({{a, 2.0}, {b, 1.0}}, {.context = 10, .seed = 5, .held_out = 0.05}).restore(state),
                    Contains("other data: seed was 4, and is 5"));
  CHECK_THROWS_WITH(whole.restore(from_text(R"({"position": -1})")), Contains("is damaged"));
  CHECK_THROWS_WITH(whole.restore(from_text("[]")), Contains("is damaged"));
}

TEST_CASE("a context that is longer than the data is refused with the numbers") {
  const TempFolder folder;
  const TokenFile file = counting_file(folder / "f", 100);
  CHECK(Batches({{file, {}}}, {.context = 99}).windows() == 1);
  CHECK_THROWS_WITH(Batches({{file, {}}}, {.context = 100}),
                    Contains("has 100 tokens, but one window of context 100 needs 101") && Contains("at most 99"));
  CHECK_THROWS_WITH(Batches({{file, {}}}, {.context = 0}), Contains("the context is 0"));
  CHECK_THROWS_WITH(Batches({}, {.context = 1}), Contains("there is no token file"));
}

TEST_CASE("invalid UTF-8 is counted and replaced as Rust and Python do") {
  const std::vector<std::pair<std::string, std::size_t>> cases{{"plain ascii that is long enough", 0},
                                                               {"é€😀", 0},
                                                               {"\xff\xfe", 2},
                                                               {"cut \xe4\xb8", 1},
                                                               {"\xf0\x9f\x98", 1},
                                                               {"\xf0\x9f and", 1},
                                                               {"\xc0\xaf", 2},
                                                               {"\xe0\x80\xaf", 3},
                                                               {"\xed\xa0\x80", 3},
                                                               {"\xf4\x90\x80\x80", 4},
                                                               {"\xf8\x88\x80\x80", 4},
                                                               {"a\xe9"
                                                                "b\xc3",
                                                                2}};
  const TempFolder folder;
  tiny_tokenizer(folder.path());
  const Tokenizer tokenizer = Tokenizer::open(folder.path());
  for (const auto& [text, count] : cases) {
    CAPTURE(text);
    CHECK(count_invalid_utf8(text) == count);
    CHECK(count_invalid_utf8(replace_invalid_utf8(text)) == 0);
    CHECK(tokenizer.encode(replace_invalid_utf8(text)) == tokenizer.encode(text));
  }
  CHECK(replace_invalid_utf8("a\xff\xc3\xa9") == "a\xef\xbf\xbdé");
}

TEST_CASE("texts in pieces give the ids of the whole, for tokenizers of both families") {
  const TempFolder folder;
  for (const auto& make : {tiny_tokenizer, sentence_tokenizer}) {
    make(folder.path());
    const Tokenizer tokenizer = Tokenizer::open(folder.path());
    const nlohmann::json json = read_tokenizer_json(folder.path());
    TextEncoder encoder(tokenizer, json, 2);
    REQUIRE(encoder.split_points().any());
    std::size_t cut = 0;
    for (unsigned seed = 0; seed < 60; ++seed) {
      const std::string text = random_text(3000, seed);
      std::vector<TextPiece> pieces;
      std::size_t begin = 0;
      for (std::size_t at; (at = encoder.split_points().next(text, begin + 1 + seed)) != std::string::npos; begin = at)
        pieces.push_back({text.substr(begin, at - begin), begin == 0, false});
      pieces.push_back({text.substr(begin), begin == 0, true});
      cut += pieces.size() - 1;
      pieces.push_back({"the end", true, true});
      const auto ids = encoder.encode(pieces);
      TokenIds together;
      for (std::size_t i = 0; i + 1 < ids.size(); ++i) together.insert(together.end(), ids[i].begin(), ids[i].end());
      CAPTURE(seed);
      REQUIRE(together == tokenizer.encode(text, false));
      REQUIRE(std::ranges::equal(ids.back(), tokenizer.encode("the end", false)));
    }
    CHECK(cut > 1000);
  }
  // No split point where a piece of the vocabulary lies across, nor beside an added token that brings a space of its
  // own.
  const SplitPoints split_points(read_tokenizer_json(folder.path()));
  CHECK(split_points.next("the, the", 1) == std::string::npos);
  CHECK(split_points.next("the. the", 1) == 4);
  CHECK(split_points.next("</s> the", 1) == std::string::npos);
  CHECK(split_points.next("the <s>", 1) == std::string::npos);
}

TEST_CASE("a tokenizer that is not known well is given whole documents") {
  const TempFolder folder;
  tiny_tokenizer(folder.path());
  const auto split_points_with = [&](const char* pointer, const Json& value) {
    Json json = from_text(read_file(folder / "tokenizer.json"));
    json[Json::json_pointer(pointer)] = value;
    return SplitPoints(nlohmann::json::parse(to_text(json))).any();
  };
  CHECK(split_points_with("/version", "1.0"));
  CHECK(split_points_with("/normalizer", {{"type", "NFC"}}));
  CHECK_FALSE(split_points_with("/normalizer", {{"type", "Lowercase"}}));
  CHECK_FALSE(split_points_with("/pre_tokenizer", {{"type", "Whitespace"}}));
  CHECK_FALSE(split_points_with("/pre_tokenizer/add_prefix_space", true));
  CHECK_FALSE(split_points_with("/model/dropout", 0.1));
  CHECK_FALSE(split_points_with("/model/type", "Unigram"));
  CHECK_FALSE(split_points_with("/added_tokens/0/lstrip", true));
  CHECK_FALSE(split_points_with("/added_tokens/0/content", "two words"));
}

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
