// Commands whose output is in somebody's way: what appears while they run, what --force may replace, and inputs.
#include <sys/wait.h>

#include <csignal>

#include "catch.h"
#include "compare/recipes.h"
#include "core/error.h"
#include "report/report.h"
#include "support.h"

namespace output_test {

using namespace tapetune;
using namespace tapetune::test;
namespace fs = std::filesystem;

namespace {

using Words = std::vector<std::string>;

// Runs a command until its output is about to get its name, does something else meanwhile, and lets it end.
RunResult run_around(const Words& words, const std::function<void()>& meanwhile) {
  const TempFolder folder;
  const pid_t child = start(words, [&] {
    ::setenv("TAPETUNE_STOP_AT", "commit:1", 1);
    redirect(folder / "out", stdout);
    redirect(folder / "err", stderr);
  });
  int status = 0;
  ::waitpid(child, &status, WUNTRACED);
  REQUIRE(WIFSTOPPED(status));
  meanwhile();
  ::kill(child, SIGCONT);
  ::waitpid(child, &status, 0);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read_file(folder / "out"), read_file(folder / "err")};
}

std::size_t names_in(const fs::path& folder) {
  return static_cast<std::size_t>(std::distance(fs::directory_iterator(folder), fs::directory_iterator()));
}

}  // namespace

TEST_CASE("a file that appears while a GGUF file is written is kept, unless --force is given") {
  const TinyModel model;
  const std::string out = (model.folder / "x.gguf").string();
  const Words words{"-q", "export", model.path(), "--gguf", "f32", "--out", out};
  const RunResult refused = run_around(words, [&] { write_file(out, "theirs"); });
  CHECK(refused.exit == 1);
  CHECK_THAT(refused.err, Contains("already exists") && Contains("--force"));
  CHECK(read_file(out) == "theirs");
  fs::remove(out);
  Words forced = words;
  forced.emplace_back("--force");
  CHECK(run_around(forced, [&] { write_file(out, "theirs"); }).exit == 0);
  CHECK(read_file(out).starts_with("GGUF"));
  CHECK(names_in(model.folder.path()) == 2);  // and the model
}

TEST_CASE("an export that is killed at 30 moments leaves nothing, and is then made as if it never was") {
  const TinyModel model;
  const auto export_to = [&](const std::string& name) {
    return Words{"-q", "export", model.path(), "--gguf", "f16", "--out", (model.folder / name).string()};
  };
  REQUIRE(run(export_to("whole.gguf")).exit == 0);
  std::vector<std::string> moments;
  for (int n = 1; n <= 20; ++n) moments.push_back(fmt::format("tensor:{}", n));
  for (int n = 0; n < 5; ++n) moments.insert(moments.end(), {"file:1", "commit:1"});
  REQUIRE(moments.size() == 30);
  for (const std::string& moment : moments) {
    INFO(moment);
    REQUIRE(killed_at(moment, export_to("x.gguf")));
    CHECK_FALSE(fs::exists(model.folder / "x.gguf"));
    CHECK(names_in(model.folder.path()) == 3);  // the model, the first file, and one partial
  }
  REQUIRE(run(export_to("x.gguf")).exit == 0);
  CHECK(read_file(model.folder / "x.gguf") == read_file(model.folder / "whole.gguf"));
  CHECK(names_in(model.folder.path()) == 3);
}

TEST_CASE("what a killed export wrote is removed by the next one") {
  const TinyModel model;
  const std::string out = (model.folder / "x.gguf").string();
  const Words words{"-q", "export", model.path(), "--gguf", "f32", "--out", out};
  REQUIRE(killed_at("commit:1", words));
  CHECK(names_in(model.folder.path()) == 2);  // the model, and a partial
  CHECK_FALSE(fs::exists(out));
  REQUIRE(run(words).exit == 0);
  CHECK(fs::exists(out));
  CHECK(names_in(model.folder.path()) == 2);
}

TEST_CASE("output: --force replaces a folder only if the command wrote all that is in it") {
  const TinyModel model;
  const Words words{"-q", "convert", model.path(), "--out", model.out(), "--force"};
  REQUIRE(run(words).exit == 0);
  REQUIRE(run(words).exit == 0);  // its own
  // Shards of an earlier conversion are its own as well.
  Words sharded = words;
  sharded.insert(sharded.end(), {"--shard-size", "100KB"});
  REQUIRE(run(sharded).exit == 0);
  REQUIRE(run(words).exit == 0);
  for (const char* name : {"paper.tex", "thesis.pdf", "data.csv", "photo.jpg"}) {
    write_file(fs::path(model.out()) / name, "precious");
  }
  const auto before = contents(model.out());
  for (const Words& each :
       {words, Words{"-q", "adapter", model.path(), "--method", "lora", "--out", model.out(), "--force"}}) {
    const RunResult refused = run(each);
    CHECK(refused.exit == 1);
    CHECK_THAT(refused.err, Contains("files that this command does not write") && Contains("and "));
  }
  CHECK_THAT(run(words).err, Contains("(data.csv, paper.tex, photo.jpg and 1 more)"));
  CHECK(contents(model.out()) == before);
}

TEST_CASE("output: --force never deletes an input") {
  const TinyModel model;
  const fs::path folder = model.folder / "d";
  fs::create_directory(folder);
  const std::string text = (folder / "in.txt").string(), gguf = (folder / "g.gguf").string(),
                    weights = (model / "model.safetensors").string();
  write_file(text, "some text");
  REQUIRE(run({"-q", "export", model.path(), "--gguf", "f32", "--out", gguf}).exit == 0);
  const auto before = contents(model.folder.path());
  const std::pair<Words, std::string> cases[] = {
      {{"import", gguf, "--out", folder.string()}, "holds the input"},
      {{"import", gguf, "--out", gguf}, "is the input itself"},
      {{"convert", model.path(), "--out", model.path()}, "is the input itself"},
      {{"convert", model.path(), "--out", model.folder.path().string()}, "holds the input"},
      {{"export", model.path(), "--gguf", "f32", "--out", weights}, "is a file of the input"},
      {{"data", "pack", text, "--model", model.path(), "--out", text}, "is the input itself"},
      {{"data", "pack", folder.string(), "--model", model.path(), "--out", text}, "is the input itself"},
      {{"data", "pack", text, "--model", model.path(), "--out", weights}, "is a file of the input"},
      {{"logits", model.path(), "--tokens", "1,2", "--out", weights}, "is a file of the input"},
      {{"check", "gradients", model.path(), "--method", "lora", "--tokens", "1,2,3", "--out", weights},
       "is a file of the input"},
      {{"adapter", model.path(), "--method", "lora", "--out", model.path()}, "is the input itself"}};
  for (const auto& [given, reason] : cases) {
    Words words = given;
    words.emplace_back("--force");
    const RunResult refused = run(words);
    INFO(fmt::format("{}: {}", fmt::join(words, " "), refused.err));
    CHECK(refused.exit == 1);
    CHECK_THAT(refused.err, Contains(reason));
    CHECK(contents(model.folder.path()) == before);
  }
  // A GGUF file beside the weights that it was made of may be made again.
  const std::string beside = (model / "x.gguf").string();
  for (int i = 0; i < 2; ++i) {
    CHECK(run({"-q", "export", model.path(), "--gguf", "f32", "--out", beside, "--force"}).exit == 0);
  }
}

TEST_CASE("a comparison never writes above its folder of runs, whatever a recipe is called") {
  const TempFolder folder;
  for (const char* name : {"...yaml", "..yaml", ".hidden.yaml"}) {
    write_file(folder / name, "model: m\ndata: d.tokens\nrun: r\n");
    CHECK_THAT(error_of([&] { read_recipes({(folder / name).string()}, {}, folder / "runs"); }),
               Contains("must not begin with a dot"));
  }
}

}  // namespace output_test
