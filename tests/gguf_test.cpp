// GGUF: the block formats, files that are wrong, and the way there and back. tests/interop/test_gguf.py compares with
// llama.cpp's own packages.
#include <sys/resource.h>

#include <cstring>

#include "catch.h"
#include "checkpoint/checkpoint.h"
#include "core/error.h"
#include "core/json.h"
#include "gguf/import.h"
#include "gguf/metadata.h"
#include "gguf/quants.h"
#include "gguf/reader.h"
#include "gguf/settings.h"
#include "gguf/writer.h"
#include "hf/tokenizer.h"
#include "support.h"

namespace gguf_test {

using namespace tapetune;
using namespace tapetune::test;
using gguf::TensorType;
namespace fs = std::filesystem;

namespace {

// A file with these keys and one tensor of f32 numbers, whose description the test may bend.
struct Sketch {
  gguf::Metadata metadata;
  std::uint32_t version = 3, type = 0;
  std::uint64_t tensors = 1, keys = 0, offset = 0, data = 64;
  std::vector<std::uint64_t> dimensions{4, 2};

  std::string bytes() const {
    std::string file = "GGUF";
    gguf::append(file, version);
    gguf::append(file, tensors);
    gguf::append(file, keys != 0 ? keys : metadata.count());
    file += metadata.bytes();
    for (std::uint64_t i = 0; i < std::min<std::uint64_t>(tensors, 2); ++i) {
      gguf::append_text(file, "t" + std::to_string(i));
      gguf::append(file, static_cast<std::uint32_t>(dimensions.size()));
      for (const std::uint64_t size : dimensions) gguf::append(file, size);
      gguf::append(file, type);
      gguf::append(file, offset);
    }
    file.resize((file.size() + 31) / 32 * 32 + data);
    return file;
  }
};

gguf::File parse(const std::string& bytes) { return gguf::File::parse(std::as_bytes(std::span(bytes)), "x.gguf"); }

// The tiny model of the other tests as a GGUF file beside it.
struct TinyFile : TinyModel {
  explicit TinyFile(const std::string& variant = "default", TensorType type = TensorType::f32) {
    tiny_checkpoint(folder / "m", variant);
    write(type);
  }
  void write(TensorType type) const {
    const Checkpoint checkpoint = Checkpoint::open(folder / "m");
    gguf::write_gguf(file(), checkpoint.config(), [&](const std::string& name) { return checkpoint.tensor(name); },
                     {type, folder / "m", "tiny", true});
  }
  std::string file() const { return (folder / "m.gguf").string(); }
};

template <typename Matcher>
void refused(const RunResult& result, const Matcher& matcher, const fs::path& untouched) {
  CHECK(result.exit == 1);
  CHECK_THAT(result.err, matcher);
  CHECK(std::count(result.err.begin(), result.err.end(), '\n') == 1);
  CHECK_FALSE(fs::exists(untouched));
}

}  // namespace

TEST_CASE("gguf: metadata and tensors are found by name, with floats as they were written") {
  Sketch sketch;
  sketch.metadata.text("a.text", "héllo");
  sketch.metadata.whole("a.whole", 7);
  sketch.metadata.number("a.number", 1e-5);
  sketch.metadata.flag("a.flag", true);
  sketch.metadata.texts("a.texts", {"", "x y"});
  sketch.metadata.numbers("a.numbers", std::vector<float>{0.5f, -3});
  const std::string bytes = sketch.bytes();
  const gguf::File file = parse(bytes);
  CHECK(file.text("a.text") == "héllo");
  CHECK(file.whole("a.whole") == 7);
  CHECK(file.number("a.number") == 1e-5);  // not the double of the nearest float
  CHECK(file.number("a.whole") == 7.0);
  CHECK(file.flag("a.flag") == true);
  CHECK(file.texts("a.texts") == std::vector<std::string>{"", "x y"});
  CHECK(file.numbers("a.numbers") == std::vector<double>{0.5, -3});
  CHECK_FALSE(file.text("b").has_value());
  CHECK_THROWS_WITH(file.whole("a.text"), Contains("x.gguf: a.text must be a whole number"));
  CHECK_THROWS_WITH(file.text("a.texts"), Contains("must be one value, not a list"));
  CHECK_THROWS_WITH(file.numbers("a.texts"), Contains("must be a list of finite numbers"));
  REQUIRE(file.tensor("t0") != nullptr);
  CHECK(file.tensor("t0")->shape == std::vector<std::int64_t>{2, 4});
  CHECK(file.tensor("t0")->bytes.size() == 32);
}

TEST_CASE("gguf: a header that lies is refused before anything is read by it") {
  const auto refusal = [](const auto& bend, const std::string& part) {
    Sketch sketch;
    sketch.metadata.whole("k", 1);
    bend(sketch);
    INFO(part);
    CHECK_THROWS_WITH(parse(sketch.bytes()), Contains("[gguf] x.gguf") && Contains(part));
  };
  CHECK_THROWS_WITH(parse("GGML1234567890"), Contains("is not a GGUF file"));
  CHECK_THROWS_WITH(parse("GG"), Contains("ends within its first bytes"));
  refusal([](Sketch& s) { s.version = 1; }, "is GGUF version 1, but tapetune reads 2 and 3");
  refusal([](Sketch& s) { s.version = 3u << 24; }, "big-endian");
  refusal([](Sketch& s) { s.tensors = ~0ull; }, "says that it has 18446744073709551615 tensors");
  refusal([](Sketch& s) { s.keys = 1ull << 60; }, "metadata keys, but");
  refusal([](Sketch& s) { s.metadata.whole("k", 2); }, "has the key k twice");
  refusal([](Sketch& s) { s.metadata.whole("general.alignment", 24); }, "general.alignment must be a power of two");
  refusal([](Sketch& s) { s.type = 13; }, "tensor t0 is stored as Q5_K, which tapetune does not read");
  refusal([](Sketch& s) { s.type = 99; }, "stored as type 99");
  refusal([](Sketch& s) { s.type = 8; }, "has rows of 4, but Q8_0 stores blocks of 32");
  refusal([](Sketch& s) { s.dimensions = {}; }, "has 0 dimensions");
  refusal([](Sketch& s) { s.dimensions = {1, 1, 1, 1, 1}; }, "has 5 dimensions");
  refusal([](Sketch& s) { s.dimensions = {4, 0}; }, "a dimension of 0");
  refusal([](Sketch& s) { s.dimensions = {1ull << 33, 1ull << 33}; }, "which cannot be");
  refusal([](Sketch& s) { s.offset = 8; }, "starts at 8, which is no multiple of 32");
  refusal([](Sketch& s) { s.offset = 64; }, "the file is truncated");
  refusal([](Sketch& s) { s.offset = ~31ull; }, "the file is truncated");
  refusal([](Sketch& s) { s.tensors = 2; }, "tensors t0 and t1 overlap");
  Sketch list;
  list.metadata.texts("k", {"abc"});
  std::string bytes = list.bytes();
  bytes[24 + 8 + 1 + 4 + 4] = '\x7f';  // the count of its texts
  CHECK_THROWS_WITH(parse(bytes), Contains("ends within k") || Contains("values of k"));
}

TEST_CASE("gguf: any part and any damage of a file is read or refused, never more") {
  const TinyFile model;
  const std::string whole = read_file(model.file());
  const auto survive = [](const std::string& bytes) {
    try {
      gguf::read_settings(parse(bytes));
      return true;
    } catch (const Error&) {
      return false;
    }
  };
  CHECK(survive(whole));
  const std::size_t head = whole.size() - Checkpoint::open(model.path()).bytes();
  for (std::size_t size = 0; size < whole.size(); size += size < head ? 7 : 997) {
    INFO(size);
    CHECK_FALSE(survive(whole.substr(0, size)));
  }
  for (std::size_t at = 0; at < head; at += 3) {
    std::string damaged = whole;
    damaged[at] = static_cast<char>(damaged[at] ^ (at % 2 == 0 ? 0xff : 0x01));
    survive(damaged);  // either is right; reading past the end or asking for absurd memory is not
  }
}

TEST_CASE("gguf: there and back again, a model is the same") {
  const TinyFile model;
  gguf::import_gguf(model.file(), model.out());
  const Checkpoint before = Checkpoint::open(model.path()), after = Checkpoint::open(model.out());
  CHECK(after.stored().size() == before.stored().size());
  for (const auto& [name, stored] : before.stored()) {
    INFO(name);
    CHECK(at::equal(after.tensor(name), before.tensor(name)));
  }
  const Json said = from_text(after.config().json), meant = from_text(before.config().json);
  for (const auto& [key, value] : meant.items()) {
    INFO(key);
    CHECK(said[key] == value);
  }
  const Tokenizer one = Tokenizer::open(model.path()), two = Tokenizer::open(model.out());
  for (const char* text : {"", "hello world", "a é € <s> b</s>", "  two  spaces "}) {
    INFO(text);
    CHECK(two.encode(text) == one.encode(text));
    CHECK(two.decode(one.encode(text)) == one.decode(one.encode(text)));
  }
  CHECK(two.bos() == one.bos());
  CHECK(two.eos() == one.eos());
}

TEST_CASE("gguf: narrower types round once, and vectors stay f32") {
  const TinyFile model;
  const Checkpoint before = Checkpoint::open(model.path());
  for (const TensorType type : {TensorType::f16, TensorType::bf16, TensorType::q8_0}) {
    INFO(gguf::format_of(type).name);
    model.write(type);
    gguf::ImportOptions options;
    options.replace = true;
    gguf::import_gguf(model.file(), model.out(), options);
    const Checkpoint after = Checkpoint::open(model.out());
    const at::ScalarType dtype = type == TensorType::bf16 ? at::kBFloat16 : at::kHalf;
    for (const auto& [name, stored] : before.stored()) {
      INFO(name);
      const at::Tensor is = after.tensor(name), was = before.tensor(name);
      if (was.dim() == 1) {
        CHECK(at::equal(is, was));
      } else if (type != TensorType::q8_0) {
        CHECK(at::equal(is, was.to(dtype)));
      } else if (was.size(1) % 32 != 0) {
        CHECK(at::equal(is, was.to(at::kHalf).to(at::kFloat)));  // rows of 56 are no whole blocks
      } else {
        const at::Tensor steps = was.reshape({-1, 32}).abs().amax(-1, true) / 127;  // [blocks, 1]
        const at::Tensor away = (is - was).reshape({-1, 32}).abs();
        CHECK((away <= steps * 0.57).all().item<bool>());  // half a step, and the scale's own rounding
        CHECK(away.max().item<double>() > 0);
      }
    }
  }
}

TEST_CASE("gguf: import writes the dtype that it is told") {
  const TinyFile model;
  const Checkpoint before = Checkpoint::open(model.path());
  gguf::ImportOptions options;
  options.dtype = at::kBFloat16;
  gguf::import_gguf(model.file(), model.out(), options);
  const Checkpoint after = Checkpoint::open(model.out());
  for (const auto& [name, stored] : before.stored()) {
    CHECK(at::equal(after.tensor(name), before.tensor(name).to(at::kBFloat16)));
  }
}

TEST_CASE("gguf: rotary scaling survives where llama.cpp has it, and is refused where not") {
  for (const char* variant : {"default", "linear", "yarn", "llama3"}) {
    INFO(variant);
    const TinyFile model(variant);
    gguf::import_gguf(model.file(), model.out());
    const RopeConfig before = Checkpoint::open(model.path()).config().rope;
    const RopeConfig after = Checkpoint::open(model.out()).config().rope;
    CHECK(after.type == before.type);
    CHECK(after.theta == before.theta);
    CHECK(after.factor == before.factor);
    CHECK(after.original_context == before.original_context);
    CHECK(after.low_freq_factor == before.low_freq_factor);
    CHECK(after.high_freq_factor == before.high_freq_factor);
  }
  for (const auto& [variant, part] :
       {std::pair{"dynamic", "no dynamic rotary scaling"}, std::pair{"longrope", "no longrope rotary scaling"},
        std::pair{"yarn-mscale", "llama.cpp's yarn"}}) {
    INFO(variant);
    CHECK_THROWS_WITH(TinyFile(variant), Contains(part));
  }
}

TEST_CASE("gguf: llama.cpp's qwen2 knows no heads of a width of their own") {
  ModelConfig config = random_config(false);
  config.architecture = Architecture::qwen2;
  config.head_dim = config.hidden_size / config.heads;
  gguf::Metadata metadata;
  CHECK_NOTHROW(gguf::write_settings(metadata, config));
  config.head_dim *= 2;
  CHECK_THROWS_WITH(gguf::write_settings(metadata, config), Contains("llama.cpp's qwen2"));
}

TEST_CASE("gguf: Llama 3's own divisors are recognised, and others refused") {
  RopeConfig rope;
  rope.type = RopeType::llama3;
  rope.theta = 500000;
  rope.factor = 32;
  rope.original_context = 8192;
  const std::vector<float> factors = gguf::llama3_factors(rope, 64);
  // As llama.cpp's converter has them for Llama 3.2 1B.
  CHECK(factors.front() == 1);
  CHECK(factors.back() == 32);
  const TinyModel model;
  for (const double bend : {1.0, 1.3}) {
    Sketch sketch;
    gguf::Metadata& m = sketch.metadata;
    m.text("general.architecture", "llama");
    for (const char* key : {"block_count", "attention.head_count", "feed_forward_length", "context_length"})
      m.whole(std::string("llama.") + key, 1);
    m.whole("llama.embedding_length", 64);
    m.number("llama.attention.layer_norm_rms_epsilon", 1e-6);
    m.number("llama.rope.freq_base", 500000);
    std::string file = "GGUF";
    gguf::append<std::uint32_t>(file, 3);
    gguf::append<std::uint64_t>(file, 2);
    gguf::append<std::uint64_t>(file, m.count());
    file += m.bytes();
    const auto tensor = [&](const char* name, std::vector<std::uint64_t> dimensions, std::uint64_t offset) {
      gguf::append_text(file, name);
      gguf::append(file, static_cast<std::uint32_t>(dimensions.size()));
      for (const std::uint64_t size : dimensions) gguf::append(file, size);
      gguf::append<std::uint32_t>(file, 0);
      gguf::append(file, offset);
    };
    tensor("token_embd.weight", {64, 1}, 128);
    tensor("rope_freqs.weight", {32}, 0);
    file.resize((file.size() + 31) / 32 * 32);
    for (std::size_t i = 0; i < factors.size(); ++i) gguf::append(file, factors[i] * (i == 10 ? float(bend) : 1.0f));
    file.resize(file.size() + 256);
    if (bend == 1.0) {
      const RopeConfig read = gguf::read_settings(parse(file)).rope;
      CHECK(read.type == RopeType::llama3);
      CHECK(read.factor == 32);
      CHECK(read.original_context == 8192);
    } else {
      CHECK_THROWS_WITH(gguf::read_settings(parse(file)), Contains("frequency") && Contains("which Llama 3's scaling"));
    }
  }
}

TEST_CASE("gguf: sentencepiece's tokenizers come back with the same ids") {
  for (const char* name : {"data/stories260K", "data/llama2-tokenizer"}) {
    const fs::path folder = shared(name);
    if (folder.empty()) return;
    const Tokenizer before = Tokenizer::open(folder);
    const TempFolder temp;
    // A model of this vocabulary and nothing else.
    ModelConfig config = random_config(true);
    config.vocab_size = before.size();
    config.layers = 1;
    gguf::write_gguf(temp / "m.gguf", config,
                     [&](const std::string& tensor) {
                       const auto all = tensor_specs(config);
                       return at::zeros(std::find_if(all.begin(), all.end(), [&](const auto& e) {
                                          return e.name == tensor;
                                        })->shape);
                     },
                     {TensorType::f16, folder, "x", false});
    gguf::import_gguf(temp / "m.gguf", temp / "out");
    const Tokenizer after = Tokenizer::open(temp / "out");
    const std::string text = read_file(folder.parent_path() / "tinystories" / "stories.txt").substr(0, 60'000);
    for (const std::string& each :
         {text, std::string("Zürich, naïve 東京 😀 \t tabs\n\n  and <s> marks</s>"), std::string()}) {
      CHECK(after.encode(each) == before.encode(each));
      CHECK(after.decode(before.encode(each)) == before.decode(before.encode(each)));
    }
  }
}

TEST_CASE("gguf: bad input to import leaves nothing and says why") {
  const TinyFile model;
  const std::string whole = read_file(model.file());
  const auto import = [&](const std::string& bytes) {
    write_file(model.folder / "bad.gguf", bytes);
    return run({"import", (model.folder / "bad.gguf").string(), "--out", model.out()});
  };
  const auto replaced = [&](const std::string& from, const std::string& to) {
    REQUIRE(from.size() == to.size());
    REQUIRE(whole.find(from) != std::string::npos);
    std::string bytes = whole;
    return bytes.replace(bytes.find(from), from.size(), to);
  };
  refused(run({"import", (model.folder / "no.gguf").string(), "--out", model.out()}), Contains("no.gguf"), model.out());
  refused(run({"import", model.path(), "--out", model.out()}), Contains("is not a regular file"), model.out());
  refused(import(""), Contains("is empty"), model.out());
  refused(import("a text that is no model at all"), Contains("bad.gguf: is not a GGUF file"), model.out());
  refused(import(whole.substr(0, whole.size() - 4000)), Contains("the file is truncated"), model.out());
  refused(import(whole.substr(0, 300)), Contains("truncated or damaged"), model.out());
  refused(import(replaced(std::string("\x05\0\0\0\0\0\0\0llama", 13), std::string("\x05\0\0\0\0\0\0\0gemma", 13))),
          Contains("architecture gemma is not supported; tapetune imports llama, qwen2, qwen3, smollm3"), model.out());
  refused(import(replaced("blk.1.ffn_down.weight", "blk.1.ffn_back.weight")),
          Contains("tensor blk.1.ffn_down.weight [32, 56] is missing"), model.out());
  refused(import(replaced("blk.0.attn_q.bias", "blk.0.attn_x.bias")),
          Contains("bias, which no plain model of this architecture has"), model.out());
  refused(import(replaced("llama.block_count", "llama.block_kount")), Contains("llama.block_count is missing"),
          model.out());
  refused(import(replaced("gpt-2", "gpt-9")), Contains("has the pre-tokenizer \"gpt-9\", but tapetune supports smollm"),
          model.out());
  refused(import(replaced("gpt2", "bert")), Contains("a tokenizer of kind bert"), model.out());
  CHECK(std::distance(fs::directory_iterator(model.folder.path()), fs::directory_iterator()) == 3);
}

TEST_CASE("gguf: import and export refuse an output that exists, and a failed write leaves nothing") {
  const TinyModel model;
  const std::string file = (model.folder / "m.gguf").string();
  const auto out = [&](const std::vector<std::string>& more, const std::function<void()>& before = {}) {
    std::vector<std::string> words{"export", model.path(), "--gguf", "f32", "--out", file};
    words.insert(words.end(), more.begin(), more.end());
    return run(words, before);
  };
  const auto limited = [] {
    const rlimit limit{50'000, 50'000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  };
  refused(out({}, limited), Contains("File too large"), file);
  CHECK(std::distance(fs::directory_iterator(model.folder.path()), fs::directory_iterator()) == 1);
  const RunResult exported = out({});
  CHECK(exported.exit == 0);
  CHECK(exported.out == fmt::format("wrote {} ({:.0f} kB)\n", file, static_cast<double>(fs::file_size(file)) / 1e3));
  CHECK_THAT(out({}).err, Contains("already exists") && Contains("--force"));
  CHECK(out({"--force"}).exit == 0);
  CHECK(run({"export", model.path(), "--gguf", "q3_k", "--out", file}).exit == 2);
  const RunResult imported = run({"import", file, "--out", model.out()});
  CHECK(imported.exit == 0);
  CHECK_THAT(imported.out, Contains(fmt::format("wrote {} (4 files, ", model.out())) && Contains(" kB)\n"));
  CHECK_THAT(run({"import", file, "--out", model.out()}).err, Contains("already exists") && Contains("--force"));
  CHECK(run({"import", file, "--out", model.out(), "--force", "--dtype", "f16", "--shard-size", "30KB"}).exit == 0);
  CHECK(run({"inspect", model.out()}).exit == 0);
  refused(run({"import", file, "--out", (model.folder / "o").string()}, limited), Contains("File too large"),
          model.folder / "o");
}

TEST_CASE("gguf: export refuses a tokenizer that llama.cpp does not have, and NaN, Inf or too large weights") {
  const TinyModel model;
  const std::string file = (model.folder / "m.gguf").string();
  const auto out = [&](const char* type) { return run({"export", model.path(), "--gguf", type, "--out", file}); };
  const std::string good = read_file(model / "tokenizer.json");
  const auto bend = [&](const std::function<void(Json&)>& change) {
    Json json = from_text(good);
    change(json);
    write_file(model / "tokenizer.json", to_text(json));
  };
  bend([](Json& json) { json["pre_tokenizer"] = {{"type", "Whitespace"}}; });
  refused(out("f32"), Contains("tokenizer.json: its pre-tokenizer has no equivalent in llama.cpp"), file);
  bend([](Json& json) { json["model"]["vocab"]["more"] = 61; });
  refused(out("f32"), Contains("token \"more\" has id 61, but the model has 61 rows"), file);
  fs::remove(model / "tokenizer.json");
  refused(out("f32"), Contains("tokenizer.json: no such file"), file);
  write_file(model / "tokenizer.json", good);

  const Checkpoint checkpoint = Checkpoint::open(model.path());
  for (const auto& [type, number] : {std::pair{TensorType::f16, 1e5}, std::pair{TensorType::q8_0, double(INFINITY)}}) {
    const auto load = [&, number = number](const std::string& name) {
      at::Tensor tensor = checkpoint.tensor(name).clone();
      if (name == "model.layers.1.mlp.up_proj.weight") tensor[3][4] = number;
      return tensor;
    };
    CHECK_THROWS_WITH(gguf::write_gguf(file, checkpoint.config(), load, {type, model.path(), "", false}),
                      Contains("model.layers.1.mlp.up_proj.weight has NaN, Inf or values out of range for"));
    CHECK_FALSE(fs::exists(file));
  }
}

}  // namespace gguf_test
