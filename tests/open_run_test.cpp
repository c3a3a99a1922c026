// What commands find when they open a run: its context, its base model, its checkpoints, and paths that moved.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <random>

#include "catch.h"
#include "checkpoint/writer.h"
#include "core/json.h"
#include "data/token_file.h"
#include "run/inputs.h"
#include "run/open.h"
#include "support.h"

namespace open_run_test {

using namespace tapetune;
using namespace tapetune::test;
namespace fs = std::filesystem;

namespace {

using Words = std::vector<std::string>;

std::string numbers(int count) {
  std::string text = "3";
  for (int i = 1; i < count; ++i) text += fmt::format(",{}", 3 + i * 7 % 58);
  return text;
}

// A tiny model with a context of 48, and a run that trains on it for two steps.
struct Trained {
  explicit Trained(const std::string& settings = "context: 16\nadapter: {method: lora, rank: 2}\n", int tokens = 2000) {
    tiny_tokens(model, data(), tokens);
    write_file(recipe(), fmt::format("model: {}\ndata: {}\nrun: {}\nsteps: 2\nbatch: 2\nmicro_batch: 2\nsave_every: 1\n"
                                     "optimizer: {{lr: 0.1}}\nheld_out: 0.1\ndtype: f32\n{}",
                                     model.path(), data().string(), path(), settings));
    const RunResult result = run({"train", recipe().string(), "--threads", "1"});
    INFO(result.err);
    REQUIRE(result.exit == 0);
  }
  fs::path data() const { return model.folder / "data.tokens"; }
  fs::path recipe() const { return model.folder / "recipe.yaml"; }
  fs::path folder() const { return model.folder / "run"; }
  std::string path() const { return folder().string(); }
  fs::path out() const { return model.folder / "out.safetensors"; }

  RunResult logits(const std::string& of, Words words = {}) const {
    words.insert(words.begin(), {"logits", of, "--tokens", numbers(12), "--out", out().string(), "--force"});
    return run(words);
  }
  // The logits of a model that must open without a word.
  at::Tensor values(const std::string& of, const Words& words = {}) const {
    const RunResult result = logits(of, words);
    INFO(result.err);
    REQUIRE(result.exit == 0);
    CHECK(result.err.empty());
    return load_tensors(out()).at("logits").clone();
  }
  TinyModel model;
};

// Other numbers in as many bytes, and the time that the file had if so wanted.
void change_weights(const fs::path& file, bool keep_time) {
  struct stat before{};
  REQUIRE(::stat(file.c_str(), &before) == 0);
  std::string bytes = read_file(file);
  bytes[bytes.size() - 2] = static_cast<char>(bytes[bytes.size() - 2] ^ 1);
  write_file(file, bytes);
  const timespec later{before.st_mtim.tv_sec + 5, 0};
  const timespec times[2] = {keep_time ? before.st_mtim : later, keep_time ? before.st_mtim : later};
  REQUIRE(::utimensat(AT_FDCWD, file.c_str(), times, 0) == 0);
}

}  // namespace

TEST_CASE("a run has the context that it was trained for, in every command") {
  // No factor: theta alone was changed, so that only the recipe knows how long the sequences were.
  const Trained trained("context: 96\nadapter: {method: theta-scaling, rank: 2}\n");
  CHECK(from_text(run({"inspect", trained.path(), "--json"}).out)["adapter"]["context"] == 96);
  const RunResult text = run({"generate", trained.path(), "--tokens", numbers(70), "--max-new-tokens", "3", "--json"});
  INFO(text.err);
  CHECK(text.exit == 0);
  CHECK(text.err.empty());
  const RunResult end =
      run({"generate", trained.path(), "--tokens", numbers(95), "--max-new-tokens", "3", "--ignore-eos"});
  CHECK_THAT(end.err, Contains("stopped at the context of 96 tokens"));
  const RunResult logits = trained.logits(trained.path());
  CHECK(logits.err.empty());
  const RunResult eval =
      run({"eval", "perplexity", trained.path(), "--data", trained.data().string(), "--split", "held-out", "--json"});
  INFO(eval.err);
  const Json json = from_text(eval.out);
  CHECK(json["model_context"] == 96);
  CHECK(json["results"][0]["context"] == 96);
  CHECK(json["results"][0]["beyond_context"] == false);
  const TrainedModel opened = open_run(trained.folder());
  CHECK(opened.adapted.model.config().context == 96);
}

TEST_CASE("a run that was trained on shorter sequences keeps the model's context, dynamic scaling its rule") {
  const Trained shorter("context: 16\nadapter: {method: lora, rank: 2}\npositions: {scaling: linear, factor: 2}\n");
  CHECK(open_run(shorter.folder()).adapted.model.config().longest_context() == 96);
  const Trained dynamic("context: 96\nadapter: {method: lora, rank: 2}\npositions: {scaling: dynamic, factor: 4}\n");
  const TrainedModel opened = open_run(dynamic.folder());
  CHECK(opened.adapted.model.config().context == 48);
  CHECK(opened.adapted.model.config().longest_context() == 192);
}

TEST_CASE("a run whose base model changed since training is refused with both hashes, or used with --any-base") {
  const Trained trained;
  const fs::path weights = trained.model / "model.safetensors";
  const at::Tensor before = trained.values(trained.path());
  const std::string hash = Checkpoint::open(trained.model.path()).hash();
  change_weights(weights, /*keep_time=*/false);
  const std::string other = Checkpoint::open(trained.model.path()).hash();
  REQUIRE(other != hash);
  const std::string run_folder = trained.path(), data = trained.data().string();
  const std::vector<Words> commands{
      {"logits", run_folder, "--tokens", "3,4,5", "--out", trained.out().string(), "--force"},
      {"generate", run_folder, "--tokens", "3,4,5", "--max-new-tokens", "1"},
      {"inspect", run_folder},
      {"eval", "perplexity", run_folder, "--data", data, "--context", "16", "--limit", "40", "--split", "held-out"},
      {"merge", run_folder, "--out", (trained.model.folder / "merged").string()}};
  for (Words words : commands) {
    INFO(words.front());
    const RunResult refused = run(words);
    CHECK(refused.exit == 1);
    CHECK(refused.out.empty());
    CHECK_THAT(refused.err, Contains(hash) && Contains(other) && Contains("--any-base"));
    words.emplace_back("--any-base");
    const RunResult taken = run(words);
    CHECK(taken.exit == 0);
    CHECK_THAT(taken.err, Contains("warning: ") && Contains(hash) && Contains(other));
  }
  // The right weights in a new file have another time and are hashed.
  change_weights(weights, /*keep_time=*/false);
  CHECK(at::equal(trained.values(trained.path()), before));
}

TEST_CASE("weights are hashed only where size or time differ from the record, or there is no record") {
  const Trained trained;
  const Json inputs = from_text(read_file(trained.folder() / "inputs.json"));
  CHECK(inputs["model_hash"] == Checkpoint::open(trained.model.path()).hash());
  CHECK(inputs["weights"].size() == 1);
  CHECK(inputs["weights"][0]["file"] == "model.safetensors");
  CHECK(inputs["weights"][0]["bytes"] == fs::file_size(trained.model / "model.safetensors"));
  // A change that size and time do not show passes, which proves that nothing was read for a hash.
  change_weights(trained.model / "model.safetensors", /*keep_time=*/true);
  CHECK(trained.logits(trained.path()).exit == 0);
  fs::remove(trained.folder() / "inputs.json");
  CHECK_THAT(trained.logits(trained.path()).err, Contains("--any-base"));
  // A damaged record is none.
  write_file(trained.folder() / "inputs.json", "{\"weights\": [");
  const RunResult damaged = trained.logits(trained.path());
  CHECK(damaged.exit == 1);
  CHECK_THAT(damaged.err, Contains("inputs.json") && Contains("--any-base"));
}

TEST_CASE("a checkpoint of a run, and its adapter folder, are models as the run is") {
  const Trained trained("context: 96\nadapter: {method: theta-scaling, rank: 2}\n");
  const fs::path checkpoints = trained.folder() / "checkpoints";
  const std::string first = (checkpoints / "step-00000001").string(), last = (checkpoints / "step-00000002").string();
  const at::Tensor result = trained.values(trained.path());
  CHECK(at::equal(trained.values(last), result));
  CHECK(at::equal(trained.values(last + "/"), result));
  CHECK(at::equal(trained.values(trained.path() + "/adapter"), result));
  CHECK_FALSE(at::equal(trained.values(first), result));
  for (const std::string& folder : {first, trained.path() + "/adapter"}) {
    CHECK(from_text(run({"inspect", folder, "--json"}).out)["adapter"]["context"] == 96);
    const RunResult text = run({"generate", folder, "--tokens", numbers(70), "--max-new-tokens", "1"});
    CHECK(text.exit == 0);
    CHECK(text.err.empty());
    CHECK(
        run({"eval", "perplexity", folder, "--data", trained.data().string(), "--limit", "200", "--split", "held-out"})
            .exit == 0);
  }
  const fs::path merged = trained.model.folder / "merged";
  REQUIRE(run({"merge", first, "--out", merged.string()}).exit == 0);
  CHECK(from_text(read_file(merged / "config.json"))["max_position_embeddings"] == 96);
  CHECK(largest_difference(trained.values(merged.string()), trained.values(first)) < 1e-4);
  // Only a checkpoint of a run is one.
  fs::copy(first, trained.model.folder / "step-00000001");
  CHECK(identify(trained.model.folder / "step-00000001").run.empty());
}

TEST_CASE("an adapter folder is a model where the base model that it names is there") {
  const Trained trained;
  const fs::path adapter = trained.model.folder / "adapter";
  fs::copy(trained.folder() / "adapter", adapter);
  CHECK(at::equal(trained.values(adapter.string()), trained.values(trained.path())));
  CHECK(from_text(run({"inspect", adapter.string(), "--json"}).out)["adapter"]["method"] == "lora");
  CHECK_THAT(trained.logits(adapter.string(), {"--method", "tape"}).err, Contains("drop --method"));
  Json config = from_text(read_file(adapter / "adapter_config.json"));
  config["base_model_name_or_path"] = "../m";  // seen from the adapter
  write_file(adapter / "adapter_config.json", to_text(config));
  CHECK(at::equal(trained.values(adapter.string()), trained.values(trained.path())));
  config["base_model_name_or_path"] = "someone/some-llama";
  write_file(adapter / "adapter_config.json", to_text(config));
  const RunResult gone = trained.logits(adapter.string());
  CHECK(gone.exit == 1);
  CHECK_THAT(gone.err, Contains("someone/some-llama") && Contains("BASE --adapter " + adapter.string()));
}

TEST_CASE("a run's paths are found as written, from the run folder, beside a run that moved, and where they were") {
  const TempFolder folder;
  const fs::path run_folder = folder / "project/runs/a", model = folder / "project/models/m";
  fs::create_directories(run_folder);
  fs::create_directories(model);
  Recipe recipe;
  recipe.model = "models/m";
  recipe.model_hash = "blake3-00";
  recipe.data = {{"data/x.tokens", 1.0}};
  CHECK(find_path("models/m", run_folder) == "models/m");  // as written where it is nowhere
  fs::create_directories(run_folder / "models/m");
  CHECK(find_path("models/m", run_folder) == run_folder / "models/m");
  fs::remove_all(run_folder / "models");

  write_file(run_folder / "inputs.json",
             to_text(Json{{"run", run_folder.string()}, {"paths", {{"models/m", model.string()}}}}));
  CHECK(find_path("models/m", run_folder) == model);
  CHECK(find_path("models/other", run_folder) == "models/other");
  const Recipe found = with_found_paths(recipe, run_folder, /*say=*/false);
  CHECK(found.model == model.string());
  CHECK(found.data.front().path == "data/x.tokens");

  fs::rename(folder / "project", folder / "moved");  // with its run
  CHECK(find_path("models/m", folder / "moved/runs/a") == folder / "moved/models/m");
  fs::create_directories(folder / "elsewhere");
  fs::rename(folder / "moved/runs/a", folder / "elsewhere/a");  // the run alone
  CHECK(find_path("models/m", folder / "elsewhere/a") == "models/m");
  fs::create_directories(model);
  CHECK(find_path("models/m", folder / "elsewhere/a") == model);
}

TEST_CASE("a run with relative paths is opened and resumed from anywhere, says so, and stays the same recipe") {
  const TinyModel model;
  const Trained made;  // for its token file
  fs::copy_file(made.data(), model.folder / "x.tokens");
  write_file(model.folder / "recipe.yaml",
             "model: m\ndata: x.tokens\nrun: run\nsteps: 2\nbatch: 2\ncontext: 16\nadapter: {method: lora, rank: 2}\n"
             "dtype: f32\n");
  const auto here = [&] { REQUIRE(::chdir(model.folder.path().c_str()) == 0); };
  const auto there = [] { REQUIRE(::chdir("/") == 0); };
  REQUIRE(run({"train", "recipe.yaml"}, here).exit == 0);
  const std::string recipe = read_file(model.folder / "run/recipe.yaml");
  const Words words{"logits", (model.folder / "run").string(), "--tokens", "3,4,5", "--force", "--out", model.out()};
  CHECK(run(words, here).err.empty());
  const RunResult away = run(words, there);
  CHECK(away.exit == 0);
  CHECK_THAT(away.err, Contains("note: ") && Contains("m not found; using " + model.path()));
  const RunResult more = run(
      {"train", (model.folder / "recipe.yaml").string(), "steps=3", "run=" + (model.folder / "run").string()}, there);
  INFO(more.err);
  CHECK(more.exit == 0);
  CHECK(from_text(read_file(model.folder / "run/inputs.json"))["paths"]["m"] == model.path());
  CHECK_THAT(read_file(model.folder / "run/recipe.yaml"), Contains("\nmodel: m\n") && Contains("\ndata: x.tokens\n"));

  fs::remove_all(model.folder / "m");
  const RunResult gone = run(words, there);
  CHECK(gone.exit == 1);
  CHECK_THAT(gone.err, Contains("its base model m is not there"));
}

TEST_CASE("a run that is evaluated on its own training text is warned of, on what it held out it is not") {
  const Trained trained;
  const Words words{"eval", "perplexity", trained.path(), "--context", "16", "--limit", "100", "--data"};
  const auto err = [&](const std::string& data, const Words& more = {}) {
    Words all = words;
    all.push_back(data);
    all.insert(all.end(), more.begin(), more.end());
    const RunResult result = run(all);
    CHECK(result.exit == 0);
    return result.err;
  };
  CHECK_THAT(err(trained.data().string()),
             Contains("warning: ") && Contains("is the run's training data") && Contains("--split held-out"));
  CHECK(err(trained.data().string(), {"--split", "held-out"}).empty());
  const fs::path other = trained.model.folder / "other.tokens";
  fs::copy_file(trained.data(), other);
  CHECK(err(other.string()).empty());
  CHECK(run({"eval", "perplexity", trained.model.path(), "--context", "16", "--limit", "100", "--data",
             trained.data().string()})
            .err.empty());
}

TEST_CASE("a run on text: its held-out part is that of the training, and text that it was trained on is warned of") {
  const TinyModel model;
  fs::create_directories(model.folder / "books");
  const auto path = [&](const std::string& name) { return (model.folder / name).string(); };
  std::mt19937 random(4);
  for (const char* name : {"books/a.txt", "books/b.txt", "other.txt"}) {
    std::string text;
    for (int i = 0; i < 1000; ++i) text += static_cast<char>('a' + random() % 26);
    write_file(path(name), text);
  }
  const std::pair<std::string, std::string> sources[] = {
      {"books/a.txt", "a.txt"}, {"books", "books"}, {"books/*.txt", "_.txt"}};
  for (const auto& [data, packed_as] : sources) {
    INFO(data);
    write_file(path("recipe.yaml"),
               fmt::format("model: {}\ndata: {}\nrun: {}\nsteps: 1\nbatch: 2\ncontext: 16\nheld_out: 0.1\ndtype: f32\n"
                           "adapter: {{method: lora, rank: 2}}\n",
                           model.path(), path(data), path("first")));
    REQUIRE(run({"train", path("recipe.yaml"), "--threads", "1"}).exit == 0);
    fs::rename(path("first"), path("run"));  // what counts is where the run is
    const auto eval = [&](const std::string& text, const Words& more = {}) {
      Words words{"eval", "perplexity", path("run"), "--context", "16", "--json", "--data", text};
      words.insert(words.end(), more.begin(), more.end());
      const RunResult result = run(words);
      INFO(result.err);
      CHECK(result.exit == 0);
      return result;
    };
    const bool folder = data != "books/a.txt";
    const std::string tokens = path(fmt::format("run/data/{}.tokens", packed_as));
    const RunResult by_tokens = eval(tokens, {"--split", "held-out"}),
                    by_text = eval(path(data), {"--split", "held-out"});
    CHECK(by_tokens.err.empty());
    CHECK(by_text.err.empty());
    const Json expected = from_text(by_tokens.out), found = from_text(by_text.out);
    for (const char* key : {"first_token", "tokens"}) CHECK(found[key] == expected[key]);
    CHECK(found["results"][0]["loss"] == expected["results"][0]["loss"]);

    CHECK_THAT(eval(tokens).err, Contains("is the run's training data"));
    CHECK_THAT(eval(path("books/a.txt")).err, Contains(folder ? "is part of the run's training data" : "is the run's"));
    if (folder) {
      CHECK_THAT(eval(path("books/a.txt"), {"--split", "held-out"}).err,
                 Contains("; --data " + path(data) + " --split held-out measures"));
    }
    CHECK(eval(path("other.txt")).err.empty());
    fs::remove_all(path("run"));
  }
}

TEST_CASE("training beyond what the positions are scaled for is warned of") {
  const Trained trained;
  const auto err = [&](const Words& settings) {
    Words words{"train", trained.recipe().string(), "steps=1", "context=96"};
    words.insert(words.end(), settings.begin(), settings.end());
    words.push_back(fmt::format("run={}", (trained.model.folder / fmt::format("run{}", settings.size())).string()));
    const RunResult result = run(words);
    INFO(result.err);
    CHECK(result.exit == 0);
    return result.err;
  };
  CHECK_THAT(err({}), Contains("context 96 is beyond the 48 tokens that the positions are scaled for; set "
                               "positions.factor=2"));
  CHECK_THAT(err({"positions.factor=2"}), !Contains("beyond"));
  CHECK_THAT(err({"adapter.method=theta-scaling", "positions.theta=1e6"}), !Contains("beyond"));
}

TEST_CASE("tied embeddings that train are a note, once a run") {
  const TinyModel model;
  Json config = from_text(read_file(model / "config.json"));
  config["tie_word_embeddings"] = true;
  write_file(model / "config.json", to_text(config));
  auto tensors = load_tensors(model / "model.safetensors");
  for (auto& [name, tensor] : tensors) tensor = tensor.clone();
  tensors.erase("lm_head.weight");
  save_safetensors(model / "model.safetensors", tensors, true);
  const Trained made;  // for its token file
  write_file(model.folder / "recipe.yaml",
             fmt::format("model: {}\ndata: {}\nrun: {}\nsteps: 2\nbatch: 2\ncontext: 16\ndtype: f32\n"
                         "adapter: {{method: lora, rank: 2}}\ntrain_also: [embeddings]\n",
                         model.path(), made.data().string(), (model.folder / "run").string()));
  const std::string recipe = (model.folder / "recipe.yaml").string();
  const RunResult first = run({"train", recipe});
  INFO(first.err);
  CHECK(first.exit == 0);
  CHECK_THAT(first.err, Contains("note: the embeddings are tied") && !Contains("warning: the embeddings"));
  const RunResult again = run({"train", recipe, "steps=3"});
  CHECK(again.exit == 0);
  CHECK_THAT(again.err, !Contains("embeddings are tied"));
}

TEST_CASE("NaN in a base weight is named when training meets it, with what helps") {
  const Trained trained;
  auto tensors = load_tensors(trained.model / "model.safetensors");
  for (auto& [name, tensor] : tensors) tensor = tensor.clone();
  tensors.at("model.layers.1.mlp.up_proj.weight")[3][4] = NAN;
  save_safetensors(trained.model / "model.safetensors", tensors, true);
  for (const std::string adapter : {"{method: lora, rank: 2}", "full"}) {
    const RunResult result = run({"train", trained.recipe().string(), "adapter=" + adapter,
                                  "run=" + (trained.model.folder / "broken").string()});
    CHECK(result.exit == 1);
    CHECK_THAT(result.err,
               Contains("step 1: the base model's weight model.layers.1.mlp.up_proj.weight has NaN or Inf") &&
                   Contains(trained.model.path() + " is damaged") && !Contains("optimizer.lr"));
    fs::remove_all(trained.model.folder / "broken");
  }
}

TEST_CASE("a model that does not fit into the address space names memory, not the path") {
#ifdef __SANITIZE_ADDRESS__
  fmt::print("SKIPPED: a limited address space has no room for the address sanitizer\n");
  return;
#endif
  const TinyModel model;
  const fs::path large = model / "model.safetensors";
  std::error_code status;
  fs::resize_file(large, std::uintmax_t{8} << 40, status);  // sparse
  if (status) {
    fmt::print("SKIPPED: a file of 8 TiB cannot be made here: {}\n", status.message());
    return;
  }
  const RunResult result = run({"inspect", model.path()}, [] {
    const rlimit limit{std::uint64_t{64} << 30, std::uint64_t{64} << 30};
    REQUIRE(::setrlimit(RLIMIT_AS, &limit) == 0);
  });
  CHECK(result.exit == 1);
  CHECK_THAT(result.err, Contains("not enough memory") && Contains("tapetune plan tells what a recipe needs") &&
                             !Contains("check the path"));
}

TEST_CASE("a GGUF file given as a model names import") {
  const TempFolder folder;
  const std::string file = (folder / "model.gguf").string(), text = (folder / "a.txt").string();
  write_file(file, "GGUF");
  write_file(text, "a");
  for (const std::string& given : {file, folder.path().string()}) {
    for (const Words& words :
         {Words{"generate", given, "--prompt", "a"}, Words{"tokenize", given},
          Words{"data", "pack", text, "--model", given, "--out", text + ".tokens"}, Words{"verify", given, given}}) {
      const RunResult result = run(words);
      CHECK(result.exit == 1);
      CHECK_THAT(result.err, Contains("tapetune import " + file + " --out DIR"));
    }
  }
}

TEST_CASE("a quantized checkpoint is named by its quantization_config") {
  const TinyModel model;
  const std::pair<const char*, const char*> kinds[] = {
      {R"({"quant_method": "awq", "bits": 4})", "awq, 4 bits"},
      {R"({"quant_method": "gptq", "bits": 8, "group_size": 128})", "gptq, 8 bits"},
      {R"({"quant_method": "bitsandbytes", "load_in_4bit": true})", "bitsandbytes, 4 bits"},
      {R"({"quant_method": "fp8"})", "quantization_config: fp8)"}};
  for (const auto& [quantization, name] : kinds) {
    Json config = from_text(read_file(model / "config.json"));
    config["quantization_config"] = from_text(quantization);
    write_file(model / "config.json", to_text(config));
    for (const Words& words : {Words{"inspect", model.path()}, Words{"generate", model.path(), "--prompt", "a"}}) {
      const RunResult result = run(words);
      CHECK(result.exit == 1);
      CHECK_THAT(result.err, Contains("quantized") && Contains(name) && Contains("before quantization"));
    }
  }
}

}  // namespace open_run_test
