// eval perplexity: runs and texts as a user gives them, resuming, and bad input.
#include "eval/perplexity.h"

#include <sys/wait.h>

#include <csignal>
#include <fstream>

#include "catch.h"
#include "support.h"
#include "token_text.h"

namespace eval_perplexity_test {

using namespace tapetune;
using namespace tapetune::test;
namespace fs = std::filesystem;

namespace {

// The tiny checkpoint, and files to evaluate it on.
struct Files {
  Files() { write_tokens(data(), random_tokens(600), read_vocabulary(model.folder / "m").hash); }
  std::string data() const { return path("text.tokens"); }
  std::string path(const std::string& name) const { return (model.folder / name).string(); }

  RunResult eval(std::vector<std::string> words, const std::string& folder = "") const {
    words.insert(words.begin(), {"eval", "perplexity", folder.empty() ? model.path() : folder, "--threads", "1"});
    return run(words);
  }
  Json json(std::vector<std::string> words, const std::string& folder = "") const {
    words.emplace_back("--json");
    const RunResult result = eval(words, folder);
    INFO(result.err);
    REQUIRE(result.exit == 0);
    return from_text(result.out);
  }
  Json losses(const std::vector<std::string>& words, const std::string& folder = "") const {
    return json(words, folder)["results"];
  }
  TinyModel model;
};

std::string train(const Files& files, const std::string& recipe) {
  write_file(files.path("recipe.yaml"), recipe + fmt::format("data: {}\nrun: {}\ncontext: 32\nsteps: 4\nbatch: 2\n"
                                                             "held_out: 0.2\neval_every: 4\ndtype: f32\n",
                                                             files.data(), files.path("run")));
  const RunResult done = run({"train", files.path("recipe.yaml"), "--threads", "1"});
  INFO(done.err);
  REQUIRE(done.exit == 0);
  return files.path("run");
}

double trained_loss(const std::string& folder) {
  const std::string text = read_file(fs::path(folder) / "metrics.jsonl");
  const std::size_t begin = text.rfind('\n', text.size() - 2) + 1;
  return from_text(text.substr(begin))["eval_loss"].get<double>();
}

}  // namespace

TEST_CASE("eval perplexity prints a table that names its protocol and marks what is beyond the context") {
  const Files files;
  const RunResult table = files.eval({"--data", files.data(), "--context", "16,64", "--buckets", "4"});
  INFO(table.out << table.err);
  CHECK(table.exit == 0);
  CHECK_THAT(table.out, Contains("protocol sliding") && Contains("16 ") && Contains("64*") &&
                            Contains("* longer than the model's context of 48") && Contains("loss by position"));
  CHECK_THAT(table.err, Contains("a context of 64 is longer than the model's context of 48"));
  CHECK(files.eval({"--data", files.data(), "--context", "16"}).err.empty());
  const Json json = files.json({"--data", files.data(), "--context", "16,64", "--buckets", "4"});
  CHECK(json["protocol"] == "sliding");
  CHECK(json["tokens"] == 600);
  CHECK(json["results"][0]["context"] == 16);
  CHECK(json["results"][0]["tokens"] == 599);
  CHECK(json["results"][0]["beyond_context"] == false);
  CHECK(json["results"][1]["beyond_context"] == true);
  CHECK(json["results"][1]["buckets"].size() == 4);
  CHECK(std::abs(std::exp(json["results"][0]["loss"].get<double>()) - json["results"][0]["perplexity"].get<double>()) <
        1e-9);
  CHECK(files.losses({"--data", files.data()})[0]["context"] == 48);  // the model's own
}

TEST_CASE("eval perplexity takes the first tokens, the last part, 16-bit tokens and text") {
  const Files files;
  const std::vector<std::string> settings{"--context", "16", "--protocol", "blocks"};
  const auto with = [&](std::vector<std::string> words) {
    words.insert(words.end(), settings.begin(), settings.end());
    return files.losses(words);
  };
  const auto tokens = random_tokens(600);
  const Json whole = with({"--data", files.data()});
  const std::uint64_t hash = read_vocabulary(files.model.folder / "m").hash;
  write_tokens(files.path("first.tokens"), {tokens.begin(), tokens.begin() + 100}, hash);
  CHECK(with({"--data", files.data(), "--limit", "100"}) == with({"--data", files.path("first.tokens")}));
  write_tokens(files.path("last.tokens"), {tokens.begin() + 479, tokens.end()}, hash);  // the last 120 of 599 targets
  CHECK(with({"--data", files.data(), "--split", "held-out", "--held-out", "0.2"}) ==
        with({"--data", files.path("last.tokens")}));
  {
    std::ofstream raw(files.path("raw.bin"), std::ios::binary);
    for (const std::uint32_t token : tokens) {
      const auto narrow = static_cast<std::uint16_t>(token);
      raw.write(reinterpret_cast<const char*>(&narrow), sizeof(narrow));
    }
  }
  CHECK(with({"--data", files.path("raw.bin")}) == whole);
  std::string text;
  for (int i = 0; i < 30; ++i) text += "the quick brown fox ";
  write_file(files.path("text.txt"), text);
  REQUIRE(run({"data", "pack", files.path("text.txt"), "--model", files.model.path(), "--eos", "none", "--out",
               files.path("packed.tokens")})
              .exit == 0);
  CHECK(with({"--data", files.path("text.txt")}) == with({"--data", files.path("packed.tokens")}));
}

TEST_CASE("eval perplexity of a run is that of its model with its adapter, and of its own held-out windows") {
  const Files files;
  const std::string folder = train(files, fmt::format("model: {}\nadapter: {{method: lora, rank: 2}}\n"
                                                      "optimizer: {{lr: 0.05}}\n",
                                                      files.model.path()));
  const std::vector<std::string> words{"--data",     files.data(), "--context", "32",
                                       "--protocol", "blocks",     "--split",   "held-out"};
  const Json found = files.json(words, folder);
  CHECK(found["first_token"] == 18 * 32 - 4 * 32);  // 18 windows, 4 of them held out
  CHECK(std::abs(found["results"][0]["loss"].get<double>() - trained_loss(folder)) < 1e-6);
  const Json whole = files.losses({"--data", files.data(), "--context", "32"}, folder);
  CHECK(whole == files.losses({"--data", files.data(), "--context", "32", "--adapter", folder + "/adapter"}));
  CHECK(whole != files.losses({"--data", files.data(), "--context", "32"}));

  fs::remove_all(fs::path(folder) / "adapter");
  const RunResult unfinished = files.eval({"--data", files.data(), "--context", "32", "--json"}, folder);
  CHECK_THAT(unfinished.err, Contains("not finished") && Contains("step 4"));
  CHECK(from_text(unfinished.out)["results"] == whole);
  CHECK_THAT(files.eval({"--data", files.data(), "--method", "tape"}, folder).err, Contains("drop --method"));
  fs::remove_all(fs::path(folder) / "checkpoints");
  const RunResult nothing = files.eval({"--data", files.data()}, folder);
  CHECK(nothing.exit == 1);
  CHECK_THAT(nothing.err, Contains("neither a result") && Contains("nor a checkpoint"));
}

TEST_CASE("eval perplexity of a run from scratch finds its weights in the run") {
  const Files files;
  const std::string folder =
      train(files, fmt::format("model: {{init: random, hidden: 32, layers: 2, heads: 4, ffn: 48, vocab: 61, "
                               "tokenizer: {}}}\noptimizer: {{lr: 0.01}}\n",
                               files.model.path()));
  const Json found = files.losses({"--data", files.data(), "--protocol", "blocks", "--split", "held-out"}, folder);
  CHECK(found[0]["context"] == 32);
  CHECK(std::abs(found[0]["loss"].get<double>() - trained_loss(folder)) < 1e-6);
}

TEST_CASE("eval perplexity resumes from its file, and refuses that of another model") {
  const Files files;
  const std::vector<std::string> words{"--data",   files.data(), "--context", "16,32",
                                       "--stride", "4",          "--resume",  files.path("sums.json")};
  const Json expected = files.losses(words);
  Json kept = from_text(read_file(files.path("sums.json")));
  CHECK(kept["perplexity"]["contexts"][1]["loss_sum"].get<double>() /
            kept["perplexity"]["contexts"][1]["tokens"].get<double>() ==
        expected[1]["loss"].get<double>());
  // As if it had been cut off after the first context.
  kept["perplexity"]["contexts"].erase(1);
  write_file(files.path("sums.json"), to_text(kept));
  CHECK(files.losses(words) == expected);
  CHECK(from_text(read_file(files.path("sums.json")))["perplexity"]["contexts"].size() == 2);
  const auto refused = [&](const std::vector<std::string>& more, const std::string& reason) {
    std::vector<std::string> all = words;
    all.insert(all.end(), more.begin(), more.end());
    const RunResult result = files.eval(all);
    CHECK(result.exit == 1);
    CHECK_THAT(result.err, Contains(reason));
  };
  refused({"--method", "lora"}, "holds results of");
  refused({"--dtype", "f64"}, "in float32");
  refused({"--limit", "500"}, "tokens was 600, now 500");
  write_file(files.path("sums.json"), "{}");
  refused({}, "does not hold results of eval perplexity");
  write_file(files.path("sums.json"), "{\"tapetune\": ");
  refused({}, "sums.json");
  fs::remove(files.path("sums.json"));
  fs::create_directory(files.path("sums.json"));
  refused({}, "is a folder");
}

TEST_CASE("eval perplexity that is interrupted exits with 3, and the same command ends with the same numbers") {
  const Files files;
  write_tokens(files.path("long.tokens"), random_tokens(12000), read_vocabulary(files.model.folder / "m").hash);
  const std::vector<std::string> words{"--data", files.path("long.tokens"), "--context", "32", "--stride", "1"};
  std::vector<std::string> kept = words;
  kept.insert(kept.end(), {"--resume", files.path("sums.json")});
  std::vector<std::string> command{"eval", "perplexity", files.model.path(), "--threads", "1", "-q"};
  command.insert(command.end(), kept.begin(), kept.end());
  const pid_t child = start(command, [&] { redirect(files.path("said"), stderr); });
  wait_for_handler(child, SIGINT);
  ::kill(child, SIGINT);
  int status = 0;
  ::waitpid(child, &status, 0);
  REQUIRE(WIFEXITED(status));
  INFO(read_file(files.path("said")));
  CHECK(WEXITSTATUS(status) == 3);
  CHECK_THAT(read_file(files.path("said")), Contains("interrupted"));
  CHECK(files.losses(kept) == files.losses(words));
}

TEST_CASE("eval perplexity: bad input is one line that says what to do") {
  const Files files;
  const auto refused = [&](std::vector<std::string> words, const std::string& reason, const std::string& folder = "") {
    if (words.empty() || words[0] != "--data") words.insert(words.begin(), {"--data", files.data()});
    const RunResult result = files.eval(words, folder);
    INFO(reason << " in " << result.err);
    CHECK(result.exit == 1);
    CHECK(result.out.empty());
    CHECK_THAT(result.err, Contains(reason));
    CHECK(std::count(result.err.begin(), result.err.end(), '\n') == 1);
  };
  refused({"--protocol", "block"}, "did you mean blocks?");
  refused({"--context", "16", "--stride", "0"}, "stride is 0");
  refused({"--context", "16", "--stride", "17"}, "larger than the context");
  refused({"--context", "16", "--stride", "8", "--protocol", "blocks"}, "drop --stride");
  refused({"--context", "600"}, "too few for one window of context 600");
  refused({"--context", "16", "--limit", "16"}, "too few");
  refused({"--context", "16", "--split", "held-out", "--held-out", "1"}, "below 1");
  write_file(files.path("empty.txt"), "");
  refused({"--data", files.path("empty.txt")}, "no text");
  write_file(files.path("empty.tokens"), "");
  refused({"--data", files.path("empty.tokens")}, "is empty");
  write_file(files.path("empty.bin"), "");
  refused({"--data", files.path("empty.bin")}, "is empty");
  refused({"--data", files.path("absent.tokens")}, "absent.tokens");
  refused({"--data", files.path("absent.txt")}, "absent.txt");
  write_file(files.path("words.tokens"), "these are words, and not tokens at all");
  refused({"--data", files.path("words.tokens")}, "is not a token file");
  write_tokens(files.path("other.tokens"), random_tokens(600), 5);
  refused({"--data", files.path("other.tokens")}, "another tokenizer");
  write_file(files.path("large.bin"), std::string(200, '\x7f'));
  refused({"--data", files.path("large.bin"), "--context", "16"}, "its vocabulary has 61");
  fs::create_directory(files.path("nothing"));
  refused({}, "neither a checkpoint", files.path("nothing"));
  refused({}, "no such folder", files.path("absent"));
  fs::remove(files.model / "tokenizer.json");
  write_file(files.path("text.txt"), "the quick brown fox");
  refused({"--data", files.path("text.txt")}, "tokenizer.json");
  CHECK(files.eval({"--data", files.data(), "--context", "0.5"}).exit == 2);
  CHECK(files.eval({"--context", "16"}).exit == 2);
  CHECK(run({"eval"}).exit == 2);
}

}  // namespace eval_perplexity_test
