// Token files: what is written is read, and damage is refused.
#include "data/token_file.h"

#include "catch.h"
#include "core/error.h"
#include "core/json.h"
#include "data/vocabulary.h"
#include "hf/tokenizer.h"
#include "support.h"
#include "token_files.h"

namespace token_file_test {

using namespace tapetune;
using namespace tapetune::test;
using namespace tapetune::test::token_files;
namespace fs = std::filesystem;

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

}  // namespace token_file_test
