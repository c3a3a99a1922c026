// What is never saved or written: numbers that are NaN or Inf, files from outside of a model, code that is not there,
// and names that break a page.
#include <cstring>

#include "catch.h"
#include "checkpoint/writer.h"
#include "core/json.h"
#include "data/token_file.h"
#include "report/tables.h"
#include "support.h"
#include "training_setup.h"

namespace model_safety_test {

using namespace tapetune;
using namespace tapetune::test;
namespace fs = std::filesystem;

namespace {

using Setup = TrainingSetup;

void change_weight(const Setup& setup, const std::string& name, std::int64_t index, double value) {
  const fs::path file = setup.model / "model.safetensors";
  auto tensors = load_tensors(file);
  for (auto& [key, tensor] : tensors) tensor = tensor.clone();
  tensors.at(name).view(-1)[index] = value;
  save_safetensors(file, tensors, true, {{"format", "pt"}});
}

// All weights train, and a token that no text has gets an embedding that one step of weight decay makes infinite.
const std::vector<std::string> overflowing{"optimizer.lr=1e12", "optimizer.weight_decay=1e12"};
void plant_overflow(const Setup& setup) { change_weight(setup, "model.embed_tokens.weight", 0, 1e16); }

}  // namespace

TEST_CASE("training: an epsilon that is 0 in f32 is refused") {
  const Setup setup;
  for (const char* eps : {"1e-300", "1e-40", "0", "-1e-8"}) {
    refused_in_a_line(setup.train({fmt::format("optimizer.eps={}", eps), "steps=1"}),
                      Contains("optimizer.eps must be a number >= 1.2e-38"));
  }
  CHECK_FALSE(fs::exists(setup.folder()));
}

TEST_CASE("training: parameters that a step made Inf are neither a checkpoint nor a result") {
  const Setup setup("{method: full}");
  plant_overflow(setup);
  for (const char* steps : {"steps=1", "steps=2"}) {  // at the end, and at a checkpoint before it
    std::vector<std::string> words = overflowing;
    words.insert(words.end(), {steps, "save_every=1"});
    const RunResult result = setup.train(words);
    CHECK(result.exit == 1);
    CHECK_THAT(result.err, Contains("error: [train] step 1: model.embed_tokens.weight is NaN or Inf; the last good "
                                    "checkpoint is none yet"));
    CHECK(fs::is_empty(setup.folder() / "checkpoints"));
    CHECK_FALSE(fs::exists(setup.folder() / "adapter"));
    fs::remove_all(setup.folder());
  }
}

TEST_CASE("ranks: parameters that a step made Inf, and a held-out loss that is NaN, end all ranks and save nothing") {
  for (const char* layout : {"shard=none", "shard=base"}) {
    INFO(layout);
    const Setup setup("{method: full}");
    plant_overflow(setup);
    std::vector<std::string> words{"launch", "--nproc", "2", "--", "train", setup.recipe(), "steps=2", "save_every=1"};
    words.insert(words.end(), overflowing.begin(), overflowing.end());
    words.insert(words.end(), {layout, "--timeout", "60"});
    const RunResult result = run(words);
    CHECK(result.exit == 1);
    CHECK_THAT(result.err, Contains("step 1: model.embed_tokens.weight is NaN or Inf"));
    CHECK(fs::is_empty(setup.folder() / "checkpoints"));
    CHECK_FALSE(fs::exists(setup.folder() / "adapter"));
  }
  const Setup setup;
  change_weight(setup, "model.embed_tokens.weight", 0, NAN);
  TokenFileInfo info = TokenFile::open(setup.data()).info();
  {
    TokenFileWriter writer(setup.data(), true, info);
    for (int i = 0; i < 4000; ++i) writer.append(i < 3900 ? 3 + i % 50 : 0);
    writer.end_document();
    writer.commit();
  }
  const std::vector<std::string> train{"train",        setup.recipe(), "steps=2",
                                       "save_every=1", "held_out=0.1", "eval_every=1"};
  for (const int ranks : {1, 2}) {
    INFO(ranks);
    std::vector<std::string> words = train;
    if (ranks > 1) words.insert(words.begin(), {"launch", "--nproc", "2", "--"});
    const RunResult result = run(words);
    CHECK(result.exit == 1);
    CHECK_THAT(result.err, Contains("step 1: the base model's weight model.embed_tokens.weight has NaN or Inf"));
    CHECK(fs::is_empty(setup.folder() / "checkpoints"));
    CHECK_FALSE(fs::exists(setup.folder() / "adapter"));
    for (const Json& line : metrics(setup.folder())) CHECK_FALSE(line.contains("eval_loss"));
    fs::remove_all(setup.folder());
  }
}

TEST_CASE("generate and eval passkey refuse weights with NaN or Inf by name, and print no text") {
  for (const auto& [name, value] :
       {std::pair("model.layers.1.mlp.up_proj.weight", NAN), std::pair("lm_head.weight", INFINITY),
        std::pair("model.layers.0.self_attn.k_proj.weight", INFINITY)}) {
    INFO(name);
    const Setup setup;
    change_weight(setup, name, 5, value);
    const std::string expected = fmt::format("[model] {}: {} has NaN or Inf", setup.model.path(), name);
    for (const std::vector<std::string>& words :
         {std::vector<std::string>{"generate", setup.model.path(), "--prompt", "abc"},
          std::vector<std::string>{"generate", setup.model.path(), "--prompt", "abc", "--temperature", "1"},
          std::vector<std::string>{"eval", "passkey", setup.model.path(), "--context", "1000", "--trials", "1"}}) {
      const RunResult result = run(words);
      CHECK(result.exit == 1);
      CHECK(result.out.empty());
      CHECK_THAT(result.err, Contains(expected));
    }
  }
  // An adapter's own numbers.
  const Setup setup;
  REQUIRE(setup.train({"steps=1"}).exit == 0);
  const fs::path file = setup.folder() / "adapter" / "adapter_model.safetensors";
  auto tensors = load_tensors(file);
  for (auto& [key, tensor] : tensors) tensor = tensor.clone();
  tensors.at("base_model.model.model.layers.0.self_attn.v_proj.lora_B.weight")[1][1] = NAN;
  save_safetensors(file, tensors, true, {{"format", "pt"}});
  const RunResult result = run({"generate", setup.folder().string(), "--prompt", "abc"});
  refused_in_a_line(result, Contains("model.layers.0.self_attn.v_proj.lora_B.weight has NaN or Inf"));
  CHECK(result.out.empty());
}

TEST_CASE("convert refuses numbers that the dtype cannot hold, and NaN in any, and writes nothing") {
  const Setup setup;
  const auto convert = [&](const std::string& dtype) {
    return run({"convert", setup.model.path(), "--out", setup.model.out(), "--dtype", dtype});
  };
  change_weight(setup, "model.norm.weight", 3, 1e30);
  refused_in_a_line(convert("f16"),
                    Contains("model.norm.weight: has NaN or Inf in f16, whose largest number is 65504; use "
                             "--dtype bf16; nothing was written"));
  CHECK_FALSE(fs::exists(setup.model.out()));
  CHECK(convert("bf16").exit == 0);
  fs::remove_all(setup.model.out());
  for (const double value : {double{NAN}, double{INFINITY}}) {
    change_weight(setup, "model.norm.weight", 3, value);
    for (const char* dtype : {"keep", "f32", "f16"}) {
      refused_in_a_line(convert(dtype), Contains("model.norm.weight: has NaN or Inf: the model is damaged"));
      CHECK_FALSE(fs::exists(setup.model.out()));
    }
  }
}

TEST_CASE("import refuses a GGUF file with NaN by the tensor's name, and writes nothing") {
  const Setup setup;
  const float marked = 1234.5F, nan = NAN;
  change_weight(setup, "model.norm.weight", 3, marked);
  const std::string file = setup.folder("x.gguf").string();
  REQUIRE(run({"export", setup.model.path(), "--gguf", "f32", "--out", file}).exit == 0);
  std::string bytes = read_file(file), pattern(sizeof marked, '\0');
  std::memcpy(pattern.data(), &marked, sizeof marked);
  const std::size_t place = bytes.find(pattern);
  REQUIRE(place != std::string::npos);
  std::memcpy(bytes.data() + place, &nan, sizeof nan);
  write_file(file, bytes);
  refused_in_a_line(run({"import", file, "--out", setup.model.out()}), Contains("model.norm.weight: has NaN or Inf"));
  CHECK_FALSE(fs::exists(setup.model.out()));
}

TEST_CASE("carried files: links out of a model's folder are refused, those of the Hugging Face cache are followed") {
  const Setup setup;
  const fs::path repo = setup.folder("models--a--b"), snapshot = repo / "snapshots" / "0123";
  fs::create_directories(repo / "blobs");
  fs::create_directories(snapshot);
  int count = 0;
  for (const auto& entry : fs::directory_iterator(setup.model.path())) {
    const std::string blob = fmt::format("blob{}", count++);
    fs::copy_file(entry.path(), repo / "blobs" / blob);
    fs::create_symlink(fs::path("../../blobs") / blob, snapshot / entry.path().filename());
  }
  const auto convert = [&](const fs::path& model) {
    fs::remove_all(setup.model.out());
    return run({"convert", model.string(), "--out", setup.model.out()});
  };
  CHECK(convert(snapshot).exit == 0);
  CHECK(read_file(fs::path(setup.model.out()) / "tokenizer.json") == read_file(setup.model / "tokenizer.json"));

  const fs::path secret = setup.folder("secret");
  write_file(secret, "not for the world");
  fs::create_symlink(secret, snapshot / "chat_template.jinja");
  refused_in_a_line(convert(snapshot),
                    Contains("chat_template.jinja: is a link to " + secret.string() + ", outside of the"));
  CHECK_FALSE(fs::exists(setup.model.out()));
  // Within the folder a link is as good as a file.
  fs::create_symlink("tokenizer.json", setup.model / "vocab.json");
  CHECK(convert(setup.model.path()).exit == 0);
}

TEST_CASE("carried files: an auto_map is left out with its Python files, and said") {
  const Setup setup;
  Json config = from_text(read_file(setup.model / "config.json"));
  config["auto_map"] = {{"AutoModelForCausalLM", "modeling_x.XForCausalLM"}};
  write_file(setup.model / "config.json", to_text(config));
  write_file(setup.model / "modeling_x.py", "import os\n");
  write_file(setup.model / "tokenizer_config.json",
             R"({"auto_map": {"AutoTokenizer": ["somebody/else--tokenization_x.X", null]}, "tokenizer_class": "X"})");
  REQUIRE(setup.train({"steps=1"}).exit == 0);
  const RunResult merged = run({"merge", setup.folder().string(), "--out", setup.model.out()});
  INFO(merged.err);
  REQUIRE(merged.exit == 0);
  CHECK_THAT(merged.err, Contains("note: config.json: auto_map is left out, because it names "
                                  "\"modeling_x.XForCausalLM\"") &&
                             Contains("tokenizer_config.json: auto_map is left out"));
  const fs::path out = setup.model.out();
  CHECK_FALSE(from_text(read_file(out / "config.json")).contains("auto_map"));
  const Json tokenizer = from_text(read_file(out / "tokenizer_config.json"));
  CHECK_FALSE(tokenizer.contains("auto_map"));
  CHECK(tokenizer.at("tokenizer_class") == "PreTrainedTokenizerFast");
  CHECK_FALSE(fs::exists(out / "modeling_x.py"));
}

TEST_CASE("model cards: names cannot break a table, a code block or the front matter, nor add HTML") {
  const Setup setup;
  REQUIRE(setup.train({"steps=1"}).exit == 0);
  const std::string name = "a|b<script>`x`\n---\n\"$(y)";
  const fs::path base = setup.folder("base|<b>`"), out = setup.folder(name);
  fs::rename(setup.model.path(), base);
  const RunResult merged = run({"merge", setup.folder().string(), "--model", base.string(), "--out", out.string()});
  INFO(merged.err);
  REQUIRE(merged.exit == 0);
  const std::string card = read_file(out / "README.md");
  CHECK_THAT(card, Contains("\n# a\\|b\\<script\\>\\`x\\` --- \"\\$(y)\n") && Contains("base\\|<b>` `` |\n") &&
                       Contains("from_pretrained(\"a|b<script>`x`\\n---\\n\\\"$(y)\", dtype") &&
                       Contains("tapetune generate 'a|b<script>`x` --- \"$(y)' --prompt"));
  const std::vector<std::string> lines = lines_of(card);
  CHECK(std::count(lines.begin(), lines.end(), "---") == 2);  // the front matter's own
}

TEST_CASE("table.md: names cannot break the table, nor add HTML or links") {
  Comparison comparison;
  comparison.contexts = {16};
  comparison.texts = {{"pg|19<img>", "pg.txt", 0, 100, false}};
  Entry entry;
  entry.name = "a|b<script>[x](y)_z_ a_b\n| c";
  entry.context = 16;
  entry.perplexity = {{{16, 16, 1, 16, 1.0, 2.0, {}}}};
  comparison.entries = {entry};
  comparison.positions = {{"factor 2", {"a|b<i>"}}, {"factor 4", {"c"}}};
  comparison.equal_positions = "tapetune compare '```\nx'";
  const std::string text = markdown(comparison);
  CHECK_THAT(text, Contains("tokens of pg\\|19\\<img\\>, protocol") &&
                       Contains("\n| a\\|b\\<script\\>\\[x\\](y)\\_z\\_ a_b \\| c | ") &&
                       Contains("(a\\|b\\<i\\>: factor 2") && Contains("\n````sh\ntapetune compare '```\nx'\n````\n"));
}

}  // namespace model_safety_test
