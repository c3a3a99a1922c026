#include <linux/seccomp.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

#include "catch.h"
#include "core/error.h"
#include "hf/hash.h"
#include "hf/safetensors.h"
#include "hf/tokenizer.h"
#include "support.h"

namespace hf_test {

using namespace tapetune;
using namespace tapetune::test;

TEST_CASE("a safetensors header is laid out as the format says") {
  std::vector<TensorEntry> entries{{"b", "BF16", {2}}, {"c", "F32", {1, 2}}, {"a", "BF16", {3}}, {"s", "F32", {}}};
  const std::string head = lay_out_safetensors(entries, {{"format", "pt"}});
  CHECK(head.size() % 8 == 0);
  const std::string body(static_cast<std::size_t>(entries.back().end), '\0');
  const std::string file = head + body;
  // Wide dtypes first, then by name; offsets without gaps; the metadata in front.
  CHECK(
      head.substr(8).rfind(R"({"__metadata__":{"format":"pt"},"c":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},)"
                           R"("s":{"dtype":"F32","shape":[],"data_offsets":[8,12]},"a":{"dtype":"BF16","shape":[3],)"
                           R"("data_offsets":[12,18]},"b":{"dtype":"BF16","shape":[2],"data_offsets":[18,22]}})",
                           0) == 0);
  const SafetensorsHeader header = read_safetensors_header(std::as_bytes(std::span(file)), "x");
  CHECK(header.data_start == head.size());
  REQUIRE(header.tensors.size() == 4);
  CHECK(header.tensors[0].name == "c");
  CHECK(header.tensors[3].end == 22);
  CHECK(header.metadata.at("format") == "pt");
}

TEST_CASE("BOS and EOS follow tokenizer_config.json") {
  const TempFolder folder;
  tiny_tokenizer(folder.path());
  const auto a = Tokenizer::open(folder.path()).encode("a", false).front();
  CHECK(Tokenizer::open(folder.path()).encode("ab") == TokenIds{1, a, a + 1});
  CHECK(Tokenizer::open(folder.path()).encode("ab", false) == TokenIds{a, a + 1});
  CHECK(Tokenizer::open(folder.path()).encode("") == TokenIds{1});
  write_file(folder / "tokenizer_config.json",
             R"({"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": false, "add_eos_token": true})");
  CHECK(Tokenizer::open(folder.path()).encode("ab") == TokenIds{a, a + 1, 2});
  write_file(folder / "tokenizer_config.json", R"({"bos_token": "<s>", "tokenizer_class": "LlamaTokenizerFast"})");
  CHECK(Tokenizer::open(folder.path()).encode("ab") == TokenIds{1, a, a + 1});
  write_file(folder / "tokenizer_config.json", R"({"bos_token": {"content": null}, "tokenizer_class": null})");
  CHECK(Tokenizer::open(folder.path()).encode("ab") == TokenIds{a, a + 1});
  write_file(folder / "tokenizer_config.json", "[]");
  CHECK_THROWS_WITH(Tokenizer::open(folder.path()), Contains("tokenizer_config.json: must be a JSON object"));
  std::filesystem::remove(folder / "tokenizer_config.json");
  CHECK(Tokenizer::open(folder.path()).encode("ab") == TokenIds{a, a + 1});
}

TEST_CASE("a batch is encoded like its texts one by one") {
  const TempFolder folder;
  tiny_tokenizer(folder.path());
  const Tokenizer tokenizer = Tokenizer::open(folder.path());
  const std::vector<std::string_view> texts{"abc", "", "é z",
                                            "a\xff"
                                            "b"};
  const std::vector<TokenIds> batch = tokenizer.encode_batch(texts);
  REQUIRE(batch.size() == texts.size());
  for (std::size_t i = 0; i < texts.size(); ++i) CHECK(batch[i] == tokenizer.encode(texts[i]));
}

TEST_CASE("streamed text is whole characters and equals the text decoded at once") {
  const TempFolder folder;
  tiny_tokenizer(folder.path());
  const Tokenizer tokenizer = Tokenizer::open(folder.path());
  const TokenIds ids = tokenizer.encode("a€b é");
  REQUIRE(ids.size() == 1 + 1 + 3 + 1 + 1 + 2);  // BOS, and a token a byte
  TokenStream stream = tokenizer.stream();
  std::string text;
  std::vector<std::string> pieces;
  for (const std::int64_t id : ids) pieces.push_back(stream.push(std::array{id}));
  for (const std::string& piece : pieces) text += piece;
  CHECK(text == "a€b é");
  CHECK(pieces[2].empty());  // the first bytes of "€" say nothing yet
  CHECK(pieces[3].empty());
  CHECK(pieces[4] == "€");
  CHECK(stream.finish().empty());
  // A text that ends within a character ends with the replacement character.
  TokenStream cut = tokenizer.stream();
  CHECK(cut.push(std::span(ids).first(3)).empty());
  CHECK(cut.finish() == "a\xef\xbf\xbd");
}

TEST_CASE("ids outside the vocabulary decode to nothing rather than fail") {
  const TempFolder folder;
  tiny_tokenizer(folder.path());
  const Tokenizer tokenizer = Tokenizer::open(folder.path());
  CHECK(tokenizer.size() == 61);
  CHECK(tokenizer.decode(std::vector<std::int64_t>{100000}).empty());
  CHECK_THROWS_WITH(tokenizer.decode(std::vector<std::int64_t>{-1}), Contains("-1 is not a token id"));
}

TEST_CASE("hash: BLAKE3, however the bytes are cut") {
  Hasher empty, whole, parts;
  CHECK(empty.hex() == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262");
  whole.add("abc");
  parts.add("a");
  parts.add("bc");
  CHECK(whole.hex() == "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85");
  CHECK(parts.hex() == whole.hex());
}

TEST_CASE("hash: where no thread can be started, one does the work") {
  const std::string bytes(1 << 20, 'x');
  const auto digest = [&] {
    Hasher hasher;
    hasher.add(bytes);
    return hasher.hex();
  };
  // The child first: the pool of threads is made once in a process.
  const TempFolder folder;
  const pid_t child = ::fork();
  if (child == 0) {
    filter_calls({BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                  BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone3, 0, 1),
                  BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),  // then clone is called
                  BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone, 0, 1),
                  BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EAGAIN)});
    write_file(folder / "digest", digest());
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  CHECK(status == 0);
  CHECK(read_file(folder / "digest") == digest());
}

}  // namespace hf_test
