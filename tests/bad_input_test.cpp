// Bad input: exit 1, one line that names the file and the remedy, and nothing written.
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "catch.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/writer.h"
#include "core/json.h"
#include "support.h"

namespace bad_input_test {

using namespace tapetune;
using namespace tapetune::test;
namespace fs = std::filesystem;

namespace {

struct Model : TinyModel {
  // Splits the weights into shards, for the errors that only an index can have.
  void shard() const {
    CHECK(run({"convert", path(), "--out", (folder / "s").string(), "--shard-size", "30KB"}).exit == 0);
    fs::remove_all(folder / "m");
    fs::rename(folder / "s", folder / "m");
  }
  // Replaces the safetensors file by this header and as many bytes of data.
  void header(const std::string& json, std::size_t bytes) const {
    std::string file(8, '\0');
    for (int i = 0; i < 8; ++i) file[static_cast<std::size_t>(i)] = static_cast<char>(json.size() >> (8 * i));
    write_file(*this / "model.safetensors", file + json + std::string(bytes, '\0'));
  }
  void config(const std::string& key, const Json& value) const {
    Json json = from_text(read_file(*this / "config.json"));
    json[key] = value;
    write_file(*this / "config.json", to_text(json));
  }
};

template <typename Matcher>
void refused(const RunResult& result, const Matcher& matcher, const fs::path& untouched) {
  CHECK(result.exit == 1);
  CHECK(result.out.empty());
  CHECK_THAT(result.err, matcher);
  CHECK(std::count(result.err.begin(), result.err.end(), '\n') == 1);
  CHECK(result.err.rfind("error: [", 0) == 0);
  CHECK_FALSE(fs::exists(untouched));
}

// All three verbs that read weights must refuse alike.
template <typename Matcher>
void refused_by_all(const Model& model, const Matcher& matcher) {
  refused(run({"inspect", model.path()}), matcher, model.out());
  refused(run({"logits", model.path(), "--tokens", "1,2", "--out", model.out()}), matcher, model.out());
  refused(run({"convert", model.path(), "--out", model.out()}), matcher, model.out());
}

}  // namespace

TEST_CASE("bad input: a folder that is not there, or is a file") {
  const Model model;
  fs::remove_all(model.folder / "m");
  refused_by_all(model, Contains(model.path()) && Contains("no such folder") && Contains("Hugging Face checkpoint"));
  write_file(model.folder / "m", "");
  refused_by_all(model, Contains("is a file; give the folder"));
}

TEST_CASE("bad input: config.json absent, not JSON, or of an unknown architecture") {
  const Model model;
  model.config("architectures", {"GPT2LMHeadModel"});
  refused_by_all(
      model, Contains("config.json") && Contains("GPT2LMHeadModel is not supported") && Contains("LlamaForCausalLM"));
  write_file(model / "config.json", "{\n  oops");
  refused_by_all(model, Contains("config.json") && Contains("is not JSON (line 2)"));
  fs::remove(model / "config.json");
  refused_by_all(model, Contains("config.json") && Contains("no such file"));
}

TEST_CASE("bad input: no weights at all") {
  const Model model;
  fs::remove(model / "model.safetensors");
  refused_by_all(model, Contains("has neither model.safetensors nor") && Contains("save_pretrained"));
}

TEST_CASE("bad input: a missing shard") {
  const Model model;
  model.shard();
  std::string gone;
  for (const auto& entry : fs::directory_iterator(model.folder / "m")) {
    if (entry.path().filename().string().rfind("model-00002", 0) == 0) gone = entry.path().string();
  }
  REQUIRE_FALSE(gone.empty());
  fs::remove(gone);
  refused_by_all(model, Contains(gone) && Contains("no such file") && Contains("download or copy this shard"));
}

TEST_CASE("bad input: an index that names a tensor which no shard has, or points outside") {
  const Model model;
  model.shard();
  Json index = from_text(read_file(model / "model.safetensors.index.json"));
  const Json original = index;
  index["weight_map"]["model.layers.9.mlp.up_proj.weight"] = index["weight_map"]["model.norm.weight"];
  write_file(model / "model.safetensors.index.json", to_text(index));
  refused_by_all(model, Contains("index.json") && Contains("model.layers.9.mlp.up_proj.weight should be in model-"));
  index = original;
  index["weight_map"]["model.norm.weight"] = "../elsewhere.safetensors";
  write_file(model / "model.safetensors.index.json", to_text(index));
  refused_by_all(model, Contains("must be a file name"));
  write_file(model / "model.safetensors.index.json", "{}");
  refused_by_all(model, Contains("has no weight_map"));
}

TEST_CASE("bad input: a truncated shard") {
  const Model model;
  fs::resize_file(model / "model.safetensors", fs::file_size(model / "model.safetensors") - 100);
  refused_by_all(
      model, Contains("model.safetensors") && Contains("not a whole safetensors file") && Contains("copy it again"));
  fs::resize_file(model / "model.safetensors", 5);
  refused_by_all(model, Contains("not a whole safetensors file"));
  fs::resize_file(model / "model.safetensors", 0);
  refused_by_all(model, Contains("model.safetensors") && Contains("is empty"));
}

TEST_CASE("bad input: a header longer than the file") {
  const Model model;
  std::string file = read_file(model / "model.safetensors");
  for (const char high : {'\x00', '\x7f'}) {
    file[3] = 1;  // 16 MB of header
    file[7] = high;
    write_file(model / "model.safetensors", file);
    refused_by_all(model, Contains("model.safetensors") && Contains("header"));
  }
}

TEST_CASE("bad input: overlapping offsets, gaps, and sizes that do not fit") {
  const Model model;
  model.header(
      R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})",
      12);
  refused_by_all(model, Contains("model.safetensors") && Contains("not a whole safetensors file"));
  model.header(
      R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[1],"data_offsets":[12,16]}})",
      16);
  refused_by_all(model, Contains("not a whole safetensors file"));
  model.header(R"({"a":{"dtype":"F32","shape":[9223372036854775807,9223372036854775807],"data_offsets":[0,8]}})", 8);
  refused_by_all(model, Contains("not a whole safetensors file"));
}

TEST_CASE("bad input: a dtype that cannot be read") {
  const Model model;
  auto tensors = load_tensors(data("tiny-model.safetensors"));
  tensors["model.norm.weight"] = at::zeros({32}, at::kInt);
  save_safetensors(model / "model.safetensors", tensors, true);
  refused_by_all(model, Contains("model.safetensors") &&
                            Contains("model.norm.weight has dtype I32; weights must be F32, F16, BF16"));
  model.header(R"({"model.norm.weight":{"dtype":"F8_E4M3","shape":[32],"data_offsets":[0,32]}})", 32);
  model.config("num_hidden_layers", 1);
  refused(run({"inspect", model.path()}), Contains("is missing") || Contains("F8_E4M3"), model.out());
  model.header(R"({"x":{"dtype":"F7","shape":[1],"data_offsets":[0,4]}})", 4);
  refused_by_all(model, Contains("F7"));
}

TEST_CASE("bad input: a missing tensor and a wrong shape") {
  const Model model;
  auto tensors = load_tensors(data("tiny-model.safetensors"));
  tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].t().contiguous();
  save_safetensors(model / "model.safetensors", tensors, true);
  refused_by_all(model, Contains("model.layers.1.mlp.up_proj.weight: expected [56, 32], but the file has [32, 56]"));
  tensors.erase("model.layers.1.mlp.up_proj.weight");
  save_safetensors(model / "model.safetensors", tensors, true);
  refused_by_all(model, Contains("tensor model.layers.1.mlp.up_proj.weight [56, 32] is missing"));
}

TEST_CASE("bad input: sizes that no file can have") {
  const Model model;
  model.config("num_hidden_layers", 2'000'000'000);
  refused_by_all(model, Contains("config.json says 2000000000 layers, but the files hold"));
}

TEST_CASE("a head that differs from embeddings it is said to be tied to is used, with a warning") {
  const Model model;
  const std::vector<std::string> logits{"logits", model.path(), "--tokens", "1,2", "--force", "--out", model.out()};
  CHECK(run(logits).exit == 0);
  const std::string untied = read_file(model.out());
  model.config("tie_word_embeddings", true);
  const RunResult result = run(logits);
  CHECK(result.exit == 0);
  CHECK_THAT(result.err, Contains("lm_head.weight differs"));
  CHECK(read_file(model.out()) == untied);
}

TEST_CASE("bad input: NaN in the rotary settings") {
  const Model model;
  std::string config = read_file(model / "config.json");
  config.replace(config.find("10000.0"), 7, "NaN");
  write_file(model / "config.json", config);
  refused_by_all(model, Contains("config.json") && Contains("has NaN, which is not valid JSON; give a finite number"));
}

TEST_CASE("bad input: tokenizer.json missing or broken") {
  const Model model;
  const std::vector<std::string> generate{"generate", model.path(), "--prompt", "ab"};
  write_file(model / "tokenizer.json", "{\"model\": 3}");
  refused(run(generate), Contains("tokenizer.json") && Contains("cannot be read") && Contains("copy it again"),
          model.out());
  fs::remove(model / "tokenizer.json");
  refused(run(generate), Contains("tokenizer.json") && Contains("no such file") && Contains("copy tokenizer.json"),
          model.out());
  CHECK(run({"generate", model.path(), "--tokens", "1,2", "--max-new-tokens", "2"}).exit == 0);  // ids need none
}

TEST_CASE("bad input: a token id out of range, and words that are no ids") {
  const Model model;
  const auto logits = [&](const std::string& tokens) {
    return run({"logits", model.path(), "--tokens", tokens, "--out", model.out()});
  };
  refused(logits("1,61"), Contains("token id 61 is out of range: the vocabulary has 61 tokens (0 to 60)"), model.out());
  refused(logits("1,x"), Contains("\"x\" is not a token id; give whole numbers"), model.out());
  refused(logits(","), Contains("no tokens; give ids"), model.out());
}

TEST_CASE("bad input: a prompt longer than the context") {
  const Model model;
  const RunResult result = run({"generate", model.path(), "--prompt", std::string(60, 'a')});
  refused(result, Contains("prompt 1 has 61 tokens, but the context is 48") && Contains("--context"), model.out());
  CHECK(run({"generate", model.path(), "--prompt", std::string(60, 'a'), "--context", "100", "--max-new-tokens", "3"})
            .exit == 0);
}

TEST_CASE("bad input: a device that does not exist, or is not on this machine") {
  const Model model;
  const auto on = [&](const std::string& device) {
    return run({"logits", model.path(), "--tokens", "1", "--out", model.out(), "--device", device});
  };
  refused(on("tpu"), Contains("[device] tpu is not a device; give auto, cpu, cuda or cuda:N"), model.out());
  refused(on("cuda:x"), Contains("cuda:x is not a device"), model.out());
  refused(on("cuda:99"), Contains("[device] cuda:99") && Contains("use --device cpu"), model.out());
}

TEST_CASE("bad input: an output that already exists is refused unless --force") {
  const Model model;
  fs::create_directory(model.out());
  write_file(fs::path(model.out()) / "mine", "precious");
  const RunResult refusal = run({"convert", model.path(), "--out", model.out()});
  CHECK(refusal.exit == 1);
  CHECK_THAT(refusal.err, Contains(model.out()) && Contains("already exists") && Contains("--force"));
  CHECK(read_file(fs::path(model.out()) / "mine") == "precious");
  // Nor is a file deleted that the command did not write.
  CHECK(run({"convert", model.path(), "--out", model.out(), "--force"}).exit == 1);
  CHECK(read_file(fs::path(model.out()) / "mine") == "precious");
  fs::rename(fs::path(model.out()) / "mine", fs::path(model.out()) / "config.json");
  CHECK(run({"convert", model.path(), "--out", model.out(), "--force"}).exit == 0);
  CHECK(read_file(fs::path(model.out()) / "config.json") != "precious");
  const std::string file = (model.folder / "f").string();
  write_file(file, "precious");
  CHECK(run({"logits", model.path(), "--tokens", "1", "--out", file}).exit == 1);
  CHECK(read_file(file) == "precious");
  CHECK(run({"logits", model.path(), "--tokens", "1", "--out", file, "--force"}).exit == 0);
}

TEST_CASE("bad input: a write that fails half-way leaves nothing") {
  const Model model;
  // A limit on the size of files fails the write in the middle, as a full disk does.
  const auto limited = [] {
    const rlimit limit{50'000, 50'000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  };
  const RunResult folder = run({"convert", model.path(), "--out", model.out()}, limited);
  refused(folder, Contains("model.safetensors: writing failed: File too large"), model.out());
  CHECK(std::distance(fs::directory_iterator(model.folder.path()), fs::directory_iterator()) == 1);
}

TEST_CASE("bad input: a full disk leaves nothing and says what to do") {
  const Model model;
  const fs::path mount = model.folder / "disk";
  fs::create_directory(mount);
  // A disk of its own, in a namespace of its own; 64 KB are half of what is to be written.
  const auto small_disk = [&] {
    if (::unshare(CLONE_NEWNS) != 0 || ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("tmpfs", mount.c_str(), "tmpfs", 0, "size=64k") != 0) {
      ::_exit(99);
    }
  };
  const RunResult result = run({"convert", model.path(), "--out", (mount / "out").string()}, small_disk);
  if (result.exit == 99) {
    fmt::print("SKIPPED: mounting a small disk needs root\n");
    return;
  }
  refused(result, Contains("are to be written, but the disk has") && Contains("free some space"), mount / "out");
  // A disk that fills up while writing: the check before the start cannot see it, so the write itself must.
  const RunResult late =
      run({"logits", model.path(), "--tokens", "1,2,3", "--out", (mount / "f").string(), "--hidden"}, [&] {
        small_disk();
        write_file(mount / "other", std::string(65536, 'x'));
      });
  refused(late, Contains("No space left on device") && Contains("free some space"), mount / "f");
}

TEST_CASE("bad input: killed at any moment, convert leaves the output absent or whole") {
  const Model model;
  for (const bool replaces : {false, true}) {
    for (const std::string moment : {"file:1", "file:2", "file:9", "commit:1", "committed:1"}) {
      INFO(moment << (replaces ? ", over a former one" : ""));
      REQUIRE(killed_at(moment, {"convert", model.path(), "--out", model.out(), "--shard-size", "4KB", "--force"}));
      REQUIRE(fs::exists(model.out()) == (replaces || moment == "committed:1"));
      if (fs::exists(model.out())) CHECK(run({"inspect", model.out()}).exit == 0);
    }
  }
  CHECK(run({"convert", model.path(), "--out", model.out(), "--force"}).exit == 0);
  // The last run cleared what the killed ones left.
  CHECK(std::distance(fs::directory_iterator(model.folder.path()), fs::directory_iterator()) == 2);
}

}  // namespace bad_input_test
