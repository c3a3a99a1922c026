// What a run keeps and tells: text that it packs, its log, its metrics' times, a summary, its disk; and resuming it by
// its folder. Also what the command line understands as a number.
#include <sys/resource.h>
#include <unistd.h>

#include <random>
#include <regex>

#include "catch.h"
#include "core/json.h"
#include "core/progress.h"
#include "data/token_file.h"
#include "support.h"

namespace run_folder_test {

using namespace tapetune;
using namespace tapetune::test;
namespace fs = std::filesystem;

namespace {

// A tiny model, a book, and a recipe that trains on it.
struct Setup {
  Setup() {
    write_file(book(), random_text(1));
    write_file(recipe(), fmt::format("model: {}\ndata: {}\nrun: {}\ncontext: 16\nadapter: {{method: lora, rank: 2}}\n"
                                     "steps: 6\nbatch: 2\nsave_every: 3\nheld_out: 0.1\ndtype: f32\n",
                                     model.path(), book(), folder()));
  }
  static std::string random_text(unsigned seed) {
    std::mt19937 random(seed);
    std::string text;
    for (int i = 0; i < 3000; ++i) text += static_cast<char>(random() % 6 == 0 ? ' ' : 'a' + random() % 26);
    return text;
  }
  std::string book() const { return (model.folder / "book.txt").string(); }
  std::string recipe() const { return (model.folder / "recipe.yaml").string(); }
  std::string folder(const std::string& name = "run") const { return (model.folder / name).string(); }
  RunResult train(std::vector<std::string> words = {}) const {
    words.insert(words.begin(), {"train", recipe(), "--threads", "1"});
    return run(words);
  }
  TinyModel model;
};

std::vector<double> losses(const std::string& folder) {
  std::vector<double> all;
  for (const Json& line : metrics(folder)) all.push_back(line.at("loss").get<double>());
  return all;
}

}  // namespace

TEST_CASE("training on text: it is packed into the run folder once, and used again on resume") {
  const Setup setup;
  const RunResult first = setup.train({"steps=3"});
  INFO(first.err);
  REQUIRE(first.exit == 0);
  const fs::path tokens = fs::path(setup.folder()) / "data/book.txt.tokens";
  CHECK_THAT(first.err, Contains(fmt::format("note: packed {} into {}: ", setup.book(), tokens.string())));
  CHECK_THAT(read_file(fs::path(setup.folder()) / "recipe.yaml"), Contains("data: " + setup.book() + "\n"));
  const auto packed_at = fs::last_write_time(tokens);

  // Touched but the same: hashed, and used.
  fs::last_write_time(setup.book(), fs::file_time_type::clock::now() + std::chrono::hours(1));
  const RunResult second = setup.train();
  INFO(second.err);
  REQUIRE(second.exit == 0);
  CHECK_THAT(second.err,
             Contains(fmt::format("note: training on {}, packed from {} before", tokens.string(), setup.book())));
  CHECK(fs::last_write_time(tokens) == packed_at);
  // As `data pack` would have packed it.
  const std::string apart = setup.folder("apart.tokens");
  REQUIRE(run({"data", "pack", setup.book(), "--model", setup.model.path(), "--out", apart}).exit == 0);
  CHECK(read_file(apart) == read_file(tokens));
  REQUIRE(setup.train({"data=" + apart, "run=" + setup.folder("apart")}).exit == 0);
  CHECK(losses(setup.folder("apart")) == losses(setup.folder()));

  // Other text is other data.
  write_file(setup.book(), Setup::random_text(2));
  const RunResult changed = setup.train({"steps=9"});
  CHECK(changed.exit == 1);
  CHECK_THAT(changed.err,
             Contains("book.txt: has changed since this run packed it") && Contains("choose another run folder"));
  // Gone: what was packed is all that is needed.
  fs::remove(setup.book());
  const RunResult gone = setup.train({"steps=9"});
  INFO(gone.err);
  CHECK(gone.exit == 0);
  CHECK_THAT(gone.err, Contains("book.txt: not found; training on"));
}

TEST_CASE("training on text: folders, JSON lines and several sources, what cannot be packed leaves nothing") {
  const Setup setup;
  fs::create_directories(setup.model.folder / "books");
  write_file(setup.folder("books/a.txt"), Setup::random_text(3));
  write_file(setup.folder("books/book.txt"), Setup::random_text(4));
  write_file(setup.folder("more.jsonl"), "{\"text\": \"" + Setup::random_text(5) + "\"}\n");
  const RunResult several = setup.train(
      {fmt::format("data=[{}, {}, {}]", setup.book(), setup.folder("books/book.txt"), setup.folder("more.jsonl"))});
  INFO(several.err);
  CHECK(several.exit == 0);
  for (const char* name : {"book.txt.tokens", "2-book.txt.tokens", "more.jsonl.tokens"}) {
    CHECK(fs::exists(fs::path(setup.folder()) / "data" / name));
  }
  const RunResult books = setup.train({"data=" + setup.folder("books/"), "run=" + setup.folder("second")});
  INFO(books.err);
  CHECK(books.exit == 0);
  CHECK(fs::exists(setup.folder("second") + "/data/books.tokens"));
  // plan counts the epochs of what a run has packed.
  const RunResult planned = run({"plan", setup.folder("second") + "/recipe.yaml", "--no-probe", "--json"});
  REQUIRE(planned.exit == 0);
  CHECK(from_text(planned.out).contains("epochs"));

  write_file(setup.folder("bad.jsonl"), "{\"text\": 3}\n");
  const RunResult bad = setup.train({"data=" + setup.folder("bad.jsonl"), "run=" + setup.folder("third")});
  CHECK(bad.exit == 1);
  CHECK_THAT(bad.err, Contains("bad.jsonl: line 1"));
  CHECK_FALSE(fs::exists(setup.folder("third")));
  // The folder of another run is not packed into.
  const RunResult other = setup.train({"data=" + setup.folder("books/a.txt")});
  CHECK(other.exit == 1);
  CHECK_THAT(other.err, Contains("another recipe"));
  CHECK_FALSE(fs::exists(setup.folder() + "/data/a.txt.tokens"));
}

TEST_CASE("training on text: a folder or a pattern that is gone is trained on as it was packed") {
  const Setup setup;
  for (const std::string text : {"books", "books/", "books/*.txt"}) {
    INFO(text);
    fs::create_directories(setup.folder("books"));
    write_file(setup.folder("books/a.txt"), Setup::random_text(3));
    const std::vector<std::string> words{"data=" + setup.folder(text), "run=" + setup.folder("gone")};
    std::vector<std::string> first = words;
    first.emplace_back("steps=3");
    REQUIRE(setup.train(first).exit == 0);
    fs::remove_all(setup.folder("books"));
    const RunResult gone = setup.train(words);
    INFO(gone.err);
    CHECK(gone.exit == 0);
    CHECK_THAT(gone.err, Contains(setup.folder(text) + ": not found; training on") && Contains("resuming at step 3"));
    fs::remove_all(setup.folder("gone"));
  }
  // A pattern that the recipe has relative is found from elsewhere at the place that the run recorded.
  fs::create_directories(setup.folder("books"));
  write_file(setup.folder("books/a.txt"), Setup::random_text(3));
  const auto here = [&] { REQUIRE(::chdir(setup.model.folder.path().c_str()) == 0); };
  REQUIRE(run({"train", "recipe.yaml", "data=books/*.txt", "run=away", "steps=3"}, here).exit == 0);
  const RunResult away = run({"train", setup.folder("away"), "steps=4"}, [] { REQUIRE(::chdir("/") == 0); });
  INFO(away.err);
  CHECK(away.exit == 0);
  CHECK_THAT(away.err, Contains("packed from " + setup.folder("books/*.txt") + " before"));
}

TEST_CASE("training on text: file names that are not UTF-8") {
  const Setup setup;
  fs::create_directories(setup.folder("books"));
  write_file(setup.folder("books/caf\xe9.txt"), Setup::random_text(3));
  for (const char* steps : {"steps=3", "steps=4"}) {
    const RunResult result = setup.train({"data=" + setup.folder("books"), steps});
    INFO(result.err);
    CHECK(result.exit == 0);
  }
}

TEST_CASE("training on text: another tokenizer packs it again, until there is a checkpoint") {
  const Setup setup;
  tiny_checkpoint(setup.model.folder / "other");
  Json tokenizer = from_text(read_file(setup.model / "tokenizer.json"));
  tokenizer["model"]["vocab"]["[60]"] = 59;
  tokenizer["model"]["vocab"]["[59]"] = 60;
  write_file(setup.folder("other/tokenizer.json"), to_text(tokenizer));
  // Fails after the text was packed.
  const RunResult failed = setup.train({"model=" + setup.folder("other"), "context=7000"});
  REQUIRE(failed.exit == 1);
  REQUIRE(fs::exists(setup.folder() + "/data/book.txt.tokens"));
  const RunResult again = setup.train();
  INFO(again.err);
  CHECK(again.exit == 0);
  CHECK_THAT(again.err, Contains("note: packed "));
}

TEST_CASE("train RUN resumes a run by its folder, also where it was moved to") {
  const Setup setup;
  REQUIRE(setup.train({"steps=3"}).exit == 0);
  const RunResult longer = run({"train", setup.folder(), "steps=6", "--threads", "1"});
  INFO(longer.err);
  CHECK(longer.exit == 0);
  CHECK_THAT(longer.err, Contains("note: resuming at step 3 of 6"));
  fs::rename(setup.folder(), setup.folder("moved"));
  const RunResult moved = run({"train", setup.folder("moved"), "steps=9", "--threads", "1"});
  INFO(moved.err);
  CHECK(moved.exit == 0);
  CHECK_FALSE(fs::exists(setup.folder()));
  CHECK(metrics(setup.folder("moved")).size() == 9);
}

TEST_CASE("train DIR with a recipe.yaml but no checkpoints names the recipe, and changes nothing") {
  const Setup setup;
  fs::create_directories(setup.folder("mine"));
  const std::string recipe = read_file(setup.recipe());
  write_file(setup.folder("mine/recipe.yaml"), recipe);
  const RunResult refused = run({"train", setup.folder("mine")});
  CHECK(refused.exit == 1);
  CHECK_THAT(refused.err, Contains("not a training run") && Contains("give " + setup.folder("mine/recipe.yaml")));
  CHECK(read_file(setup.folder("mine/recipe.yaml")) == recipe);
  CHECK(contents(setup.folder("mine")).size() == 1);
}

TEST_CASE("train RUN whose base model changed says to restore it or to choose another run folder") {
  const Setup setup;
  REQUIRE(setup.train({"steps=3"}).exit == 0);
  std::string bytes = read_file(setup.model / "model.safetensors");
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  write_file(setup.model / "model.safetensors", bytes);
  const RunResult changed = run({"train", setup.folder(), "steps=6"});
  CHECK(changed.exit == 1);
  CHECK_THAT(changed.err, Contains("the weights changed since") && Contains("restore the model") &&
                              Contains("another run folder") && !Contains("remove model_hash"));
}

TEST_CASE("train.log has what ended a run, as the user is told it, also before the first step and after the last") {
  const Setup setup;
  REQUIRE(setup.train({"steps=3"}).exit == 0);
  const fs::path log = fs::path(setup.folder()) / "train.log",
                 state = "checkpoints/step-00000003/optimizer.safetensors";
  write_file(setup.folder() / state, "none");
  const RunResult damaged = setup.train();
  REQUIRE(damaged.exit == 1);
  const std::string told = damaged.err.substr(damaged.err.find("error: "));
  CHECK(std::count(told.begin(), told.end(), '\n') == 1);
  CHECK(read_file(log).ends_with(told));
}

TEST_CASE("a run records times, where it ran, and what happened") {
  const Setup setup;
  const RunResult first = setup.train({"steps=3"});
  REQUIRE(first.exit == 0);
  const std::regex utc("[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z");
  for (const Json& line : metrics(setup.folder())) CHECK(std::regex_match(line.at("time").get<std::string>(), utc));
  REQUIRE(setup.train().exit == 0);
  std::istringstream log(read_file(fs::path(setup.folder()) / "train.log"));
  std::string text;
  for (std::string line; std::getline(log, line); text += line.substr(21) + "\n") {
    REQUIRE(line.size() > 21);
    CHECK(std::regex_match(line.substr(0, 20), utc));
  }
  char host[256] = "";
  REQUIRE(::gethostname(host, sizeof host - 1) == 0);
  CHECK_THAT(text, Contains("tapetune ") && Contains(fmt::format(" on {} (", host)) && Contains("1 thread, 1 rank") &&
                       Contains("saved step 3, loss ") && Contains("resuming at step 3 of 6") &&
                       Contains("finished: 6 steps, last loss "));
  const Json machines = from_text(read_file(fs::path(setup.folder()) / "machines.json"));
  REQUIRE(machines.size() == 2);
  CHECK(machines[1]["first_step"] == 3);
  CHECK(machines[1]["threads"] == 1);
  CHECK(machines[1]["ranks"] == 1);
  write_file(fs::path(setup.folder()) / "machines.json", "[{");  // damaged, which is no reason to stop
  const RunResult again = setup.train({"steps=7"});
  CHECK(again.exit == 0);
  CHECK_THAT(again.err, Contains("machines.json") && Contains("It is ignored."));
  CHECK_THAT(text, Contains(fmt::format("({})", machines[1]["machine"].get<std::string>())));
}

TEST_CASE("train ends with a summary whose commands can be run") {
  const Setup setup;
  const RunResult done = setup.train();
  REQUIRE(done.exit == 0);
  CHECK(std::regex_search(done.out, std::regex("^6 steps, last loss [0-9.]+, adapter in .*/run/adapter\n"
                                               "6 steps in [0-9.e+-]+ s, [0-9,]+ tokens/s, peak memory [0-9]+ MB\n"
                                               "next: tapetune eval perplexity ")));
  std::istringstream lines(done.out);
  int commands = 0;
  for (std::string line; std::getline(lines, line);) {
    const std::size_t at = line.find("tapetune ");
    if (at == std::string::npos || at > 6) continue;
    std::istringstream split(line.substr(at + 9));
    std::vector<std::string> words;
    for (std::string word; split >> word;) words.push_back(word);
    const RunResult next = run(words);
    INFO(line << "\n" << next.err);
    CHECK(next.exit == 0);
    ++commands;
  }
  CHECK(commands == 2);
  CHECK(setup.train({"steps=1", "run=" + setup.folder("one"), "--quiet"}).out.rfind("1 step, last loss", 0) == 0);
}

TEST_CASE("train's summary has paths that lead somewhere from where it ran") {
  const Setup setup;
  const std::string tokens = setup.folder("x.tokens");
  REQUIRE(run({"data", "pack", setup.book(), "--model", setup.model.path(), "--out", tokens}).exit == 0);
  const auto here = [&] { REQUIRE(::chdir(setup.model.folder.path().c_str()) == 0); };
  const RunResult first = run({"train", "recipe.yaml", "data=x.tokens", "run=run", "steps=3"}, here);
  CHECK_THAT(first.out, Contains(" --data x.tokens --split held-out"));
  const RunResult away = run({"train", setup.folder(), "steps=4"}, [] { REQUIRE(::chdir("/") == 0); });
  INFO(away.err);
  CHECK_THAT(away.out, Contains(" --data " + tokens + " --split held-out"));
}

TEST_CASE("plan's disk is what a run with tied embeddings then writes") {
  const Setup setup;
  write_file(setup.recipe(),
             fmt::format("model: {{init: random, hidden: 32, layers: 2, heads: 4, ffn: 64, vocab: 4000, tied: true, "
                         "tokenizer: {}}}\ndata: {}\nrun: {}\ncontext: 16\nsteps: 4\nbatch: 2\nsave_every: 1\n"
                         "keep: 2\n",
                         setup.model.path(), setup.book(), setup.folder()));
  const RunResult planned = run({"plan", setup.recipe(), "--no-probe", "--json"});
  INFO(planned.err);
  REQUIRE(planned.exit == 0);
  const Json plan = from_text(planned.out);
  const RunResult done = setup.train();
  INFO(done.err);
  REQUIRE(done.exit == 0);
  const auto bytes = [&](const std::string& folder) {
    double sum = 0;
    for (const auto& entry : fs::directory_iterator(setup.folder() + "/" + folder)) {
      sum += static_cast<double>(entry.file_size());
    }
    return sum;
  };
  const double checkpoint = bytes("checkpoints/step-00000004"), adapter = bytes("adapter");
  CHECK(std::abs(plan.at("checkpoint_bytes").get<double>() / checkpoint - 1) < 0.02);
  CHECK(std::abs(plan.at("disk_bytes").get<double>() / (3 * checkpoint + adapter) - 1) < 0.02);
}

TEST_CASE("out of memory names what uses less") {
#ifdef __SANITIZE_ADDRESS__
  fmt::print("SKIPPED: a limited address space has no room for the address sanitizer\n");
  return;
#endif
  const Setup setup;
  write_file(setup.recipe(), fmt::format("model: {{init: random, hidden: 1048576, layers: 1, heads: 4, ffn: 1048576, "
                                         "vocab: 61}}\ndata: {}\nrun: {}\ncontext: 16\nsteps: 4\n",
                                         setup.folder("none.tokens"), setup.folder()));
  const RunResult refused = run({"train", setup.recipe()}, [] {
    const rlimit most{std::uint64_t{1} << 38, std::uint64_t{1} << 38};  // of 4 TB
    ::setrlimit(RLIMIT_AS, &most);
  });
  CHECK(refused.exit == 1);
  CHECK_THAT(refused.err, Contains("error: [memory] out of memory (4398.0 GB asked for)") &&
                              Contains("needs least with micro_batch=1") && Contains("checkpointing=full") &&
                              Contains("tapetune plan"));
  CHECK(std::count(refused.err.begin(), refused.err.end(), '\n') == 1);
}

TEST_CASE("numbers on the command line take decimal suffixes, and a context asks which is meant") {
  const Setup setup;
  const auto plan = [&](std::vector<std::string> words) {
    words.insert(words.begin(), {"plan", setup.recipe()});
    return run(words);
  };
  const RunResult digits = plan({"--flops", "150000000000000", "--ranks", "2", "--link", "50000000000", "--json"}),
                  suffix = plan({"--flops", "150T", "--ranks", "2", "--link", "50GB", "--json"});
  INFO(suffix.err);
  REQUIRE(suffix.exit == 0);
  CHECK(from_text(digits.out).at("step_seconds") == from_text(suffix.out).at("step_seconds"));
  const RunResult gpu_digits = plan({"--no-probe", "--gpu", "2000000"}), gpu = plan({"--no-probe", "--gpu", "2MB"});
  REQUIRE(gpu.exit == 0);
  CHECK_THAT(gpu.out, Contains("does not fit 2 MB"));
  CHECK(gpu.out == gpu_digits.out);
  CHECK(plan({"--no-probe", "--gpu", "80GB"}).out == plan({"--no-probe", "--gpu", "80000000000"}).out);
  const auto refused = [](const RunResult& result, const std::string& text) {
    INFO(result.err);
    CHECK(result.exit == 2);
    CHECK_THAT(result.err, Contains(text));
    CHECK(result.err.size() < 250);
  };
  refused(plan({"--flops", "fast"}), "--flops: \"fast\" is not a number; write it as 1.5e14, 150T or 80GB");
  refused(plan({"--threads", "0"}), "--threads: \"0\" is not an integer >= 1");
  refused(plan({"--threads", "100000"}), "--threads: 100000 is more than 1024; give the number of cores");
  const auto eval = [&](std::vector<std::string> words) {
    words.insert(words.begin(), {"eval", "perplexity", setup.model.path(), "--data", setup.book()});
    return run(words);
  };
  refused(eval({"--limit", "2x"}), "--limit: \"2x\" is not an integer >= 1; k, M, G and T are decimal");
  refused(eval({"--context", "2k"}), "--context: 2k tokens: 2048 or 2000? write the number");
  refused(eval({"--context", "16,1k"}), "1024 or 1000?");
  const RunResult limited = eval({"--limit", "0.2k", "--context", "16", "--json"});
  INFO(limited.err);
  REQUIRE(limited.exit == 0);
  CHECK(from_text(limited.out).at("tokens") == 200);
}

TEST_CASE("plan names only what the recipe does not have yet where it does not fit") {
  const Setup setup;
  const auto advice = [&](std::vector<std::string> words, const std::string& ranks = "2") {
    words.insert(words.begin(), {"plan", setup.recipe(), "--no-probe", "--ranks", ranks, "--gpu", "1M"});
    const RunResult planned = run(words);
    INFO(planned.err);
    REQUIRE(planned.exit == 0);
    return planned.out.substr(planned.out.rfind("does not fit"));
  };
  CHECK_THAT(advice({"checkpointing=selective"}), Contains("shard=base") && Contains("checkpointing=full"));
  CHECK_THAT(advice({"shard=base"}), !Contains("shard=base") && !Contains("checkpointing=full") &&
                                         !Contains("micro_batch") && Contains("sequence_parallel"));
  CHECK_THAT(advice({}, "1"), Contains("several --ranks with shard=base"));
  CHECK_THAT(advice({"shard=base"}, "1"), Contains("try more --ranks") && !Contains("shard=base"));
}

TEST_CASE("progress fits the terminal, and the note goes last") {
  ProgressState state;
  state.what = "train";
  state.unit = "tokens";
  state.total = 3e6;
  state.done = 1.5e6;
  state.rate = 12345;
  state.note = "step 12345/24690  loss 2.3456";
  for (const int columns : {200, 80, 60, 40, 20, 1}) {
    INFO(columns);
    CHECK(progress_bar(state, columns).size() < static_cast<std::size_t>(std::max(columns, 2)));
  }
  CHECK(progress_bar(state, 200) ==
        "[============            ] train  50%  1.5 Mtokens  12.3 ktokens/s  2:02 left  " + state.note);
  CHECK(progress_bar(state, 80) == "[======      ] train  50%  2:02 left  " + state.note);
  CHECK(progress_bar(state, 60) == "train  50%  2:02 left  " + state.note);
  CHECK(progress_bar(state, 40) == " 50%  " + state.note);
  CHECK(progress_bar(state, 30) == " 50%  step 12345/24690  loss ");
  state.note.clear();
  state.rate = 0;
  state.done = 0;
  CHECK(progress_bar(state, 80) == "[                        ] train   0%  0 tokens");
  CHECK(progress_text(state) == "train   0%  0 tokens");
}

}  // namespace run_folder_test
