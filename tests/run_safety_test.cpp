// What a run never destroys and never goes on with: files of others, data that changed, and damaged checkpoints.
#include <linux/seccomp.h>
#include <sys/syscall.h>

#include <cstddef>
#include <random>

#include "catch.h"
#include "core/json.h"
#include "data/token_file.h"
#include "support.h"
#include "training_setup.h"

namespace run_safety_test {

using namespace tapetune;
using namespace tapetune::test;
namespace fs = std::filesystem;
using Catch::Matchers::StartsWith;

namespace {

using Setup = TrainingSetup;

void flip_last_bit(const fs::path& file) {
  std::string bytes = read_file(file);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  write_file(file, bytes);
}

// For a child: the file system has no locks.
void without_locks() {
  filter_calls({BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_flock, 0, 1),
                BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOLCK)});
}

}  // namespace

TEST_CASE("a folder that is no run's: what a run would overwrite is refused by name, and stays") {
  const Setup setup;
  REQUIRE(setup.train({"steps=1", "run=" + setup.folder("other").string()}).exit == 0);
  const std::string copy = read_file(setup.folder("other") / "recipe.yaml");
  const std::vector<std::pair<std::string, std::string>> foreign{
      {"recipe.yaml", read_file(setup.recipe())},
      {"recipe.yaml", "# tapetune 0.1.0\nsteps: 1\n"},
      {"recipe.yaml", copy},  // a copy is a recipe, not a run
      {"checkpoints/best/model.safetensors", "mine"},
      {"checkpoints", "a file"},
      {"metrics.jsonl", "{}\n"},
      {"adapter/adapter_model.safetensors", "mine"},
      {"inputs.json", "{}"},
      {"machines.json", "[]"},
      {"lock", "held by hand\n"},
      {"events.out.tfevents.0.tapetune", "mine"}};
  for (const auto& [name, text] : foreign) {
    INFO(name << ": " << text);
    const fs::path folder = setup.folder("folder");
    fs::create_directories((folder / name).parent_path());
    write_file(folder / name, text);
    const auto before = contents(folder);
    refused_in_a_line(setup.train({"run=" + folder.string()}),
                      Contains(fmt::format("{}: has {}, which no training run wrote", folder.string(),
                                           fs::path(name).begin()->string())) &&
                          Contains("Choose another run folder"));
    CHECK(contents(folder) == before);
    fs::remove_all(folder);
  }
}

TEST_CASE("a folder that is no run's: run=. does not overwrite the user's own recipe") {
  const Setup setup;
  const fs::path folder = setup.folder("mine");
  fs::create_directory(folder);
  const std::string own = "# my notes\n" + read_file(setup.recipe());
  write_file(folder / "recipe.yaml", own);
  const RunResult result = run({"train", "recipe.yaml", "run=.", "--threads", "1"}, [&] {
    if (::chdir(folder.c_str()) != 0) ::_exit(99);
  });
  refused_in_a_line(result, Contains(".: has recipe.yaml, which no training run wrote"));
  CHECK(contents(folder) == std::map<std::string, std::string>{{"recipe.yaml", own}});
}

TEST_CASE("a folder that is no run's: compare and text to pack refuse it before anything is written") {
  const Setup setup;
  const fs::path runs = setup.folder("runs");
  fs::create_directories(runs / "mine" / "adapter");
  write_file(runs / "mine" / "adapter" / "weights", "mine");
  const auto before = contents(runs);
  refused_in_a_line(run({"compare", setup.recipe(), "held_out=0.1", "--runs", runs.string(), "--out",
                         setup.folder("report").string()}),
                    Contains("mine: has adapter, which no training run wrote"));
  CHECK(contents(runs) == before);
  CHECK_FALSE(fs::exists(setup.folder("report")));

  const fs::path book = setup.folder("book.txt"), folder = setup.folder("texts");
  write_file(book, std::string(4000, 'a'));
  fs::create_directories(folder / "data");
  write_file(folder / "data" / "book.txt.tokens", "mine");
  const auto packed = contents(folder);
  refused_in_a_line(setup.train({"data=" + book.string(), "run=" + folder.string()}),
                    Contains("book.txt.tokens: is there already, and no run packed it"));
  CHECK(contents(folder) == packed);
}

TEST_CASE("a run folder: files of others stay, and only a run's own partial files are removed") {
  const Setup setup;
  const fs::path folder = setup.folder();
  fs::create_directories(folder);
  write_file(folder / "train.log", "from elsewhere\n");
  write_file(folder / "slurm-7.out", "mine");
  REQUIRE(setup.train({"steps=3"}).exit == 0);
  CHECK_THAT(read_file(folder / "train.log"), StartsWith("from elsewhere\n") && Contains("saved step 3"));

  const std::vector<std::string> kept{"checkpoints/best/weights",
                                      "checkpoints/.keep",
                                      "checkpoints/step-3-copy/weights",
                                      "checkpoints/.mine.partial-1",
                                      "data/.notes.partial-1",
                                      ".mine.partial-1",
                                      "slurm-7.out"};
  const std::vector<std::string> removed{"checkpoints/.step-00000009.partial-7/state.json",
                                         "checkpoints/.step-00000001.removed/state.json", ".recipe.yaml.partial-7",
                                         "data/.book.txt.tokens.partial-7"};
  for (const auto& names : {kept, removed}) {
    for (const std::string& name : names) {
      fs::create_directories((folder / name).parent_path());
      write_file(folder / name, "mine");
    }
  }
  REQUIRE(setup.train({"steps=6"}).exit == 0);
  const auto after = contents(folder);
  for (const std::string& name : kept) CHECK(after.at(name) == "mine");
  for (const std::string& name : removed) CHECK_FALSE(fs::exists(folder / name));
  CHECK_FALSE(fs::exists(folder / "checkpoints/.step-00000009.partial-7"));
}

TEST_CASE("a run folder: a start that was cut off and runs of earlier versions are taken up") {
  const Setup setup;
  const fs::path folder = setup.folder();
  fs::create_directories(folder / "checkpoints");
  write_file(folder / "lock", "4711\n");
  write_file(folder / ".recipe.yaml.partial-4711", "model: ");
  REQUIRE(setup.train({"steps=3"}).exit == 0);
  // Earlier versions began recipe.yaml with the version alone.
  std::string recipe = read_file(folder / "recipe.yaml");
  REQUIRE_THAT(recipe, StartsWith("# written by tapetune train, which keeps this run's recipe here\n# tapetune 0."));
  recipe.erase(0, recipe.find('\n') + 1);
  write_file(folder / "recipe.yaml", recipe);
  fs::remove(setup.checkpoint(3) / "hashes.json");
  const RunResult resumed = setup.train({"steps=6"});
  CHECK(resumed.exit == 0);
  CHECK_THAT(resumed.err, Contains("resuming at step 3 of 6"));
}

TEST_CASE("a run folder on a file system without locks is trained in, with a warning that says so") {
  const Setup setup;
  const RunResult result = setup.train({"steps=1"}, without_locks);
  CHECK(result.exit == 0);
  CHECK_THAT(result.err, Contains("lock: cannot be locked (No locks available)") && !Contains("another process is"));
}

TEST_CASE("training: a token file of the same size with other tokens is not resumed on") {
  const Setup setup;
  REQUIRE(setup.train({"steps=3"}).exit == 0);
  const std::string before = read_file(setup.data());
  const TokenFileInfo info = TokenFile::open(setup.data()).info();
  {
    TokenFileWriter writer(setup.data(), true, info);
    std::mt19937 random(99);
    for (int i = 0; i < 4000; ++i) writer.append(3 + random() % 50);
    writer.end_document();
    writer.commit();
  }
  REQUIRE(read_file(setup.data()).size() == before.size());
  const auto folder = contents(setup.folder() / "checkpoints");
  const RunResult changed = setup.train({"steps=6"});
  CHECK(changed.exit == 1);
  CHECK_THAT(changed.err, Contains("data.tokens: the tokens are not those that step 3 was trained on") &&
                              Contains("choose another run folder"));
  CHECK(contents(setup.folder() / "checkpoints") == folder);
  CHECK_THAT(setup.verify().err, Contains("data: ") && Contains("the tokens changed since the training"));
  // A checkpoint of an earlier version has no sample, and no hashes.
  const fs::path state = setup.checkpoint(3) / "state.json";
  Json json = from_text(read_file(state));
  CHECK(json.at("data_sample").get<std::string>().size() == 64);
  json.erase("data_sample");
  write_file(state, to_text(json));
  fs::remove(setup.checkpoint(3) / "hashes.json");
  CHECK(setup.train({"steps=6"}).exit == 0);
}

TEST_CASE(
    "checkpoints: a damaged newest one is named, kept aside, and the run resumes from the one before to the bit") {
  const Setup setup;
  REQUIRE(setup.train({"run=" + setup.folder("whole").string()}).exit == 0);
  struct Damage {
    std::string says;
    std::function<void(const fs::path& checkpoint)> make;
    bool hashes = true;  // false: of an earlier version
  };
  const std::vector<Damage> damages{
      {"optimizer.safetensors is not what was written: its BLAKE3 hash differs",
       [](const fs::path& c) { flip_last_bit(c / "optimizer.safetensors"); }},
      {"tapetune.json is not what was written", [](const fs::path& c) { flip_last_bit(c / "tapetune.json"); }},
      {"adapter_model.safetensors has 100 bytes, but ",
       [](const fs::path& c) { fs::resize_file(c / "adapter_model.safetensors", 100); }},
      {"state.json is missing", [](const fs::path& c) { fs::remove(c / "state.json"); }},
      {"hashes.json", [](const fs::path& c) { fs::resize_file(c / "hashes.json", 10); }},
      {"state.json", [](const fs::path& c) { fs::resize_file(c / "state.json", 10); }, false},
      {"optimizer.safetensors", [](const fs::path& c) { fs::resize_file(c / "optimizer.safetensors", 300); }, false},
      {"optimizer.safetensors is missing", [](const fs::path& c) { fs::remove(c / "optimizer.safetensors"); }, false}};
  for (const Damage& damage : damages) {
    INFO(damage.says);
    REQUIRE(setup.train({"steps=6"}).exit == 0);
    CHECK(setup.verify().exit == 0);
    damage.make(setup.checkpoint(6));
    if (!damage.hashes) fs::remove(setup.checkpoint(6) / "hashes.json");
    const RunResult found = setup.verify();
    CHECK(found.exit == 1);
    CHECK_THAT(found.err, Contains("checkpoints/step-00000006: ") && Contains(damage.says));
    const RunResult resumed = setup.train({"keep=1"});  // which must not remove good ones for the damaged one
    CHECK(resumed.exit == 0);
    CHECK_THAT(resumed.err, Contains("step-00000006: is damaged: ") && Contains(damage.says) &&
                                Contains("resuming from step 3 instead") &&
                                Contains("keeping the damaged checkpoint as step-00000006.damaged") &&
                                Contains("resuming at step 3 of 12"));
    CHECK(fs::exists(setup.folder() / "checkpoints/step-00000006.damaged"));
    CHECK(fs::exists(setup.checkpoint(12)));
    CHECK(contents(setup.folder() / "adapter") == contents(setup.folder("whole") / "adapter"));
    CHECK(untimed_metrics(setup.folder()) == untimed_metrics(setup.folder("whole")));
    fs::remove_all(setup.folder());
  }
}

TEST_CASE("checkpoints: damage without an earlier one to resume from is an error that changes nothing") {
  const Setup setup;
  REQUIRE(setup.train({"steps=3"}).exit == 0);
  flip_last_bit(setup.checkpoint(3) / "optimizer.safetensors");
  const auto before = contents(setup.folder() / "checkpoints");
  const RunResult result = setup.train({"steps=6"});
  CHECK(result.exit == 1);
  CHECK_THAT(result.err, Contains("step-00000003: is damaged: optimizer.safetensors is not what was written") &&
                             Contains("there is no earlier checkpoint to resume from"));
  CHECK(contents(setup.folder() / "checkpoints") == before);
}

TEST_CASE("checkpoints: ranks resume from the checkpoint that rank 0 chose") {
  const Setup setup;
  const auto train = [&](const std::string& steps) {
    return run({"launch", "--nproc", "2", "--", "train", setup.recipe(), steps, "--timeout", "60"});
  };
  REQUIRE(train("steps=6").exit == 0);
  flip_last_bit(setup.checkpoint(6) / "adapter_model.safetensors");
  const RunResult resumed = train("steps=9");
  INFO(resumed.err);
  CHECK(resumed.exit == 0);
  CHECK_THAT(resumed.err, Contains("resuming from step 3 instead") && Contains("resuming at step 3 of 9"));
  CHECK(metrics(setup.folder()).size() == 9);
}

TEST_CASE("verify RUN checks every part of a run, and names what is damaged") {
  const Setup setup;
  REQUIRE(setup.train().exit == 0);
  const RunResult good = setup.verify();
  INFO(good.out << good.err);
  CHECK(good.exit == 0);
  CHECK(good.err.empty());
  for (const char* part : {"recipe.yaml", "checkpoints/step-00000009", "checkpoints/step-00000012", "adapter",
                           "metrics.jsonl", "inputs.json", "machines.json", "model", "data"}) {
    const std::string line = fmt::format("{:<9}  {:<27}  ", "ok", part);
    CHECK_THAT(good.out, Contains(line));
  }
  const auto spoiled = [&](const fs::path& file, const std::function<void()>& spoil, const std::string& part) {
    INFO(part);
    const std::string before = read_file(file);
    spoil();
    const RunResult result = setup.verify();
    CHECK(result.exit == 1);
    CHECK_THAT(lines_of(result.err).back(), StartsWith("error: [verify] ") && Contains("is " + part + ": "));
    write_file(file, before);
  };
  const auto spoil = [&](const fs::path& file, const std::string& part) {
    spoiled(file, [&] { flip_last_bit(file); }, part);
  };
  spoil(setup.checkpoint(9) / "optimizer.safetensors", "checkpoints/step-00000009");
  spoil(setup.folder() / "adapter" / "adapter_model.safetensors", "adapter");
  spoil(setup.model / "model.safetensors", "model");
  for (const char* name : {"recipe.yaml", "metrics.jsonl", "inputs.json", "machines.json"}) {
    const fs::path file = setup.folder() / name;
    spoiled(file, [&] { write_file(file, "{\"step\": "); }, name);
  }
  CHECK(setup.verify().exit == 0);
  const Json json = from_text(run({"verify", setup.folder().string(), "--json"}).out);
  CHECK(json.size() == 9);
  CHECK(json[0] == Json({{"part", "recipe.yaml"}, {"state", "ok"}, {"detail", "readable"}}));
  refused_in_a_line(run({"verify", setup.model.path()}),
                    Contains("is not a training run") && Contains("give a second model"));
}

}  // namespace run_safety_test
