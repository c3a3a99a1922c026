// compare: what it refuses and why, and that nothing measured is lost.
#include <iterator>
#include <random>
#include <sstream>

#include "catch.h"
#include "compare/comparison.h"
#include "compare/eval_file.h"
#include "compare/positions.h"
#include "core/error.h"
#include "core/json.h"
#include "support.h"

namespace compare_test {

using namespace tapetune;
using namespace tapetune::test;
namespace fs = std::filesystem;

namespace {

// A tiny model, a token file, and recipes of two methods over them.
struct Setup {
  Setup() {
    tiny_tokens(model, path("data.tokens"), 4000);
    recipe("lora", "{method: lora, rank: 2}");
    recipe("tape", "{method: tape}");
  }
  std::string path(const std::string& name) const { return (model.folder / name).string(); }
  void recipe(const std::string& name, const std::string& adapter, const std::string& more = "") const {
    write_file(path(name + ".yaml"),
               fmt::format("model: {}\ndata: {}\nrun: {}\ncontext: 32\nadapter: {}\nsteps: 6\nbatch: 2\n"
                           "optimizer: {{lr: 1.0e-3}}\ndtype: f32\nsave_every: 2\nheld_out: 0.1\n{}",
                           model.path(), path("data.tokens"), path("runs/" + name), adapter, more));
  }
  std::vector<std::string> words(const std::string& out, std::vector<std::string> more = {}) const {
    std::vector<std::string> all{"compare", path("lora.yaml"), path("tape.yaml"), "--out", path(out), "--threads", "1"};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  // What does not depend on clocks.
  Json results(const std::string& out) const {
    Json json = from_text(read_file(model.folder / (out + "/results.json")));
    json.erase("cost");
    for (Json& entry : json["entries"]) entry.erase("settings");  // which name the run folder
    return json;
  }
  TinyModel model;
};

void check_refused(const Setup& setup, const std::vector<std::string>& more, const std::string& why) {
  const RunResult result = run(setup.words("out", more));
  INFO(result.err);
  CHECK(result.exit == 1);
  CHECK(result.out.empty());
  CHECK_THAT(result.err, Contains(why));
  CHECK(std::count(result.err.begin(), result.err.end(), '\n') == 1);
  CHECK(!fs::exists(setup.path("runs")));
  CHECK(!fs::exists(setup.path("out")));
}

std::string refused_plan(const std::string& text) {
  try {
    parse_eval_plan(text, "eval.yaml");
  } catch (const Error& error) {
    return error.what();
  }
  return "taken";
}

}  // namespace

TEST_CASE("compare trains, measures and reports, a second call measures nothing again") {
  const Setup setup;
  const RunResult first = run(setup.words("out"));
  INFO(first.err);
  REQUIRE(first.exit == 0);
  CHECK_THAT(first.out, Contains("| base model |") && Contains("| tape |") && Contains("report.html"));
  for (const char* file : {"report.html", "results.json", "results.csv", "cost.csv", "table.md",
                           "charts/perplexity.svg", "charts/perplexity.csv", "charts/loss.svg"}) {
    CHECK(fs::file_size(setup.path("out") + "/" + file) > 0);
  }
  const Json results = setup.results("out");
  CHECK(results["contexts"] == from_text("[4, 8, 16, 32, 64]"));
  CHECK(results["texts"][0]["held_out"] == true);
  CHECK(results["texts"][0]["first_token"] == 3584);  // 124 windows of 32, of which the last 12 are held out
  REQUIRE(results["entries"].size() == 3);
  CHECK(results["entries"][0]["method"] == "none");
  CHECK(results["entries"][0]["perplexity"][0][4]["beyond_context"] == true);  // the model is made for 48 tokens
  CHECK(results["entries"][2]["losses"].size() == 6);
  CHECK(results["differences"]["method"] == from_text(R"(["lora", "tape"])"));

  const RunResult second = run(setup.words("out"));
  CHECK(second.exit == 0);
  CHECK(second.out == first.out);
  CHECK_THAT(second.err, Contains("lora is already trained") && !Contains("training") && !Contains("perplexity at"));
  CHECK(setup.results("out") == results);
}

TEST_CASE("results.json: differing settings have their own types, and only cost depends on when and where it ran") {
  const Setup setup;
  setup.recipe("tape", "{method: tape, rank: 4, targets: [q, v]}", "dtype: f32\nuntie: true\ntrain_also: [norms]\n");
  setup.recipe("lora", "{method: lora, rank: 2}", "");
  std::string text = read_file(setup.path("tape.yaml"));
  text.replace(text.find("dtype: f32\nsave"), 11, "");  // which is given above
  text.replace(text.find("1.0e-3"), 6, "2.5e-3");
  write_file(setup.path("tape.yaml"), text);
  const RunResult result = run(setup.words("out"));
  INFO(result.err);
  REQUIRE(result.exit == 0);
  const Json json = from_text(read_file(setup.path("out/results.json")));
  const Json& differences = json["differences"];
  CHECK(differences["method"] == from_text(R"(["lora", "tape"])"));
  CHECK(differences["adapter.rank"] == from_text("[2, 4]"));
  CHECK(differences["adapter.targets"] == from_text(R"([["q", "k", "v", "o"], ["q", "v"]])"));
  CHECK(differences["positions.width"] == from_text("[null, 4]"));
  CHECK(differences["optimizer.lr"] == from_text("[0.001, 0.0025]"));
  CHECK(differences["train_also"] == from_text(R"([[], ["norms"]])"));
  CHECK(differences["untie"] == from_text("[false, true]"));
  const Json& cost = json["cost"];
  const Json& made_on = cost["report_made_on"];
  CHECK(made_on["threads"] == 1);
  CHECK(made_on["ranks"] == 1);
  CHECK(made_on["date"].get<std::string>().size() == std::string_view("2026-01-31T12:00:00Z").size());
  CHECK_THAT(made_on["machine"].get<std::string>(), Contains(" GB"));
  CHECK(cost["runs"]["tape"]["trained_parameters"].get<std::int64_t>() > 0);
  const std::string page = read_file(setup.path("out/report.html"));
  CHECK_THAT(page, Contains(made_on["date"].get<std::string>().substr(0, 10)) && Contains(", 1 thread") &&
                       Contains("a window of the given context starts every half context"));
}

TEST_CASE("the report names the machines on which the runs trained, and apart from them its own") {
  const Setup setup;
  REQUIRE(run(setup.words("out")).exit == 0);
  write_file(setup.path("runs/tape/machines.json"),
             R"([{"first_step": 0, "machine": "Big, 64 cores", "threads": 8, "ranks": 4},
                 {"first_step": 3, "machine": "Small", "threads": 1, "ranks": 1}])");
  fs::remove(setup.path("runs/lora/machines.json"));  // as an earlier version left it
  REQUIRE(run(setup.words("out")).exit == 0);
  const Json runs = from_text(read_file(setup.path("out/results.json")))["cost"]["runs"];
  CHECK(runs["tape"]["machines"] == from_text(R"(["Big, 64 cores, 8 threads on each of 4 ranks", "Small, 1 thread"])"));
  CHECK(runs["lora"]["machines"].empty());
  const std::string page = read_file(setup.path("out/report.html"));
  CHECK_THAT(page, Contains("Trained on: lora: not recorded; tape: Big, 64 cores, 8 threads on each of 4 ranks, then "
                            "Small, 1 thread.") &&
                       Contains("<td>report made on</td>"));
}

TEST_CASE("compare marks what is beyond the context of dynamic scaling as eval does") {
  const Setup setup;
  setup.recipe("tape", "{method: tape}", "positions: {scaling: dynamic, factor: 1.5}\n");
  setup.recipe("lora", "{method: lora, rank: 2}", "positions: {scaling: dynamic, factor: 1.5}\n");
  write_file(setup.path("eval.yaml"), "contexts: [96]\n");
  REQUIRE(run(setup.words("out", {"context=96", "--eval", setup.path("eval.yaml")})).exit == 0);
  const RunResult eval = run({"eval", "perplexity", setup.path("runs/lora"), "--data", setup.path("data.tokens"),
                              "--split", "held-out", "--context", "96", "--json"});
  CHECK(from_text(eval.out)["results"][0]["beyond_context"] == true);
  CHECK(setup.results("out")["entries"][1]["perplexity"][0][0]["beyond_context"] == true);
}

TEST_CASE("compare trains on text, which is packed once, and evaluates on what is held out of it") {
  const Setup setup;
  std::mt19937 random(1);
  std::string text;
  for (int i = 0; i < 4000; ++i) text += static_cast<char>('a' + random() % 26);
  write_file(setup.path("book.txt"), text);
  const std::string data = "data=" + setup.path("book.txt");
  check_refused(setup, {data, "held_out=0"}, "all of it is used for training");
  const RunResult first = run(setup.words("out", {data}));
  INFO(first.err);
  REQUIRE(first.exit == 0);
  const std::size_t packed = first.err.find("note: packed ");
  REQUIRE(packed != std::string::npos);
  CHECK(first.err.find("note: packed ", packed + 1) == std::string::npos);
  const Json results = setup.results("out");
  CHECK(results["texts"][0]["name"] == "book, held out");
  CHECK(results["texts"][0]["held_out"] == true);
  CHECK(results["texts"][0]["path"] == setup.path("book.txt"));
  // Both runs have all they need to be resumed alone.
  const std::string tokens = setup.path("runs/lora/data/book.txt.tokens");
  CHECK(read_file(tokens) == read_file(setup.path("runs/tape/data/book.txt.tokens")));
  CHECK(run({"train", setup.path("runs/tape"), "steps=7"}).exit == 0);

  fs::remove_all(setup.path("runs/tape"));
  const RunResult second = run(setup.words("out", {data}));
  INFO(second.err);
  CHECK(second.exit == 0);
  CHECK_THAT(second.err, Contains("lora is already trained") && !Contains("note: packed "));
  CHECK(setup.results("out") == results);
  // The packed file is the training text too.
  write_file(setup.path("eval.yaml"), fmt::format("data: [{}]\n", tokens));
  REQUIRE(run(setup.words("by-tokens", {data, "--eval", setup.path("eval.yaml")})).exit == 0);
  CHECK(setup.results("by-tokens")["texts"][0]["first_token"] == results["texts"][0]["first_token"]);
  CHECK(setup.results("by-tokens")["texts"][0]["held_out"] == true);
}

TEST_CASE("compare says beside its headline that positions differ, with the command that makes them equal") {
  const Setup setup;
  setup.recipe("tape", "{method: tape}", "positions: {scaling: yarn, factor: 2}\n");
  const RunResult mixed = run(setup.words("out"));
  INFO(mixed.err);
  REQUIRE(mixed.exit == 0);
  const std::string differ = "lora: no scaling; tape: yarn scaling, factor 2";
  CHECK_THAT(mixed.out, Contains(differ));
  CHECK_THAT(read_file(setup.path("out/table.md")), Contains(differ));
  CHECK(setup.results("out")["positions_differ"] == true);
  const std::string page = read_file(setup.path("out/report.html"));
  const std::size_t headline = page.find("has the lowest perplexity"), caution = page.find(differ);
  REQUIRE(caution != std::string::npos);
  CHECK(headline < caution);
  CHECK(caution < page.find("<h2>"));

  const std::string open = "```sh\ntapetune ";
  const std::size_t at = mixed.out.find(open);
  REQUIRE(at != std::string::npos);
  const std::size_t begin = at + open.size();
  std::istringstream command(mixed.out.substr(begin, mixed.out.find("```", begin) - begin));
  std::vector<std::string> words{std::istream_iterator<std::string>(command), {}};
  std::erase(words, "\\");  // ends of lines
  const RunResult equal = run(words);
  INFO(equal.err);
  REQUIRE(equal.exit == 0);
  CHECK_THAT(equal.out, !Contains("scale positions differently") && !Contains("tapetune compare"));
  CHECK(setup.results("out-equal-positions")["positions_differ"] == false);
}

TEST_CASE("equal positions: all recipes that keep their method get the best one's, and words are quoted") {
  const RopeConfig base;
  CompareOptions options;
  options.out = "it's/out";
  options.recipe_words = {"a.yaml", "b.yaml", "c.yaml"};
  options.settings = {"data=[x, y]"};
  options.eval_file = "e.yaml";
  const std::string common = "model: m\ndata: d.tokens\nrun: r\ncontext: 32\nsteps: 1\n";
  const auto named = [&](const std::string& name, const std::string& more) {
    return NamedRecipe{name, parse_recipe(common + more, name)};
  };
  const NamedRecipe lora = named("lora", "adapter: lora\npositions: {scaling: linear, factor: 2}\n"),
                    theta = named("theta", "adapter: theta-scaling\npositions: {scaling: linear, factor: 2}\n"),
                    tape = named("tape", "adapter: tape\npositions: {scaling: yarn, factor: 2.5}\n");
  // Another theta is what theta-scaling is.
  const NamedRecipe own = named("own", "adapter: theta-scaling\npositions: {theta: 1.0e+6}\n");
  CHECK(equal_positions_command({lora, theta, tape}, tape, base, options) ==
        "tapetune compare a.yaml b.yaml c.yaml \\\n  'data=[x, y]' positions.scaling=yarn positions.factor=2.5 \\\n  "
        "--runs "
        "'it'\\''s/out-equal-positions/runs' --out 'it'\\''s/out-equal-positions' --eval e.yaml");
  const NamedRecipe plain = named("plain", "adapter: lora\n"),
                    far = named("far", "adapter: lora\npositions: {scaling: none, theta: 5.0e+5}\n");
  CHECK_THAT(equal_positions_command({lora, own, plain}, plain, base, options),
             Contains("compare a.yaml c.yaml ") && Contains(" positions.scaling=null positions.factor=null \\\n"));
  CHECK_THAT(equal_positions_command({lora, theta, far}, far, base, options),
             Contains("compare a.yaml c.yaml ") &&
                 Contains(" positions.scaling=none positions.factor=null positions.theta=500000 \\\n"));
  CHECK_THAT(equal_positions_command({lora, theta, far}, lora, base, options), Contains(" positions.theta=null \\\n"));
}

TEST_CASE("positions differ where scaling, factor or theta do, but for theta-scaling's own theta") {
  const std::string common = "model: m\ndata: d.tokens\nrun: r\ncontext: 32\nsteps: 1\nadapter: ";
  RopeConfig standard, scaled;
  scaled.type = RopeType::linear;
  scaled.factor = 4;
  const auto groups = [&](const std::vector<std::string>& recipes, const RopeConfig& base) {
    std::vector<NamedRecipe> named;
    for (const std::string& each : recipes) named.push_back({each, parse_recipe(common + each, "r")});
    std::vector<std::string> settings;
    for (const PositionGroup& group : position_groups(named, base)) settings.push_back(group.settings);
    return settings;
  };
  using Settings = std::vector<std::string>;
  const std::string lora = "lora\n", none = "lora\npositions: {scaling: none}\n",
                    linear = "lora\npositions: {scaling: linear, factor: 2}\n",
                    same_theta = "lora\npositions: {theta: 10000}\n", far = "lora\npositions: {theta: 5.0e+5}\n",
                    theta = "theta-scaling\n", theta_yarn = "theta-scaling\npositions: {scaling: yarn, factor: 2}\n",
                    theta_linear = "theta-scaling\npositions: {scaling: linear, factor: 2}\n";
  CHECK(groups({lora, none, same_theta}, standard) == Settings{"no scaling"});
  CHECK(groups({none, far}, standard) == Settings{"no scaling", "no scaling, theta 500000"});
  CHECK(groups({lora, linear}, scaled) == Settings{"the base model's scaling", "linear scaling, factor 2"});
  CHECK(groups({linear, theta}, standard) == Settings{"linear scaling, factor 2"});
  CHECK(groups({theta_linear, linear}, standard) == Settings{"linear scaling, factor 2"});
  CHECK(groups({theta_linear, linear, far}, standard) ==
        Settings{"linear scaling, factor 2", "no scaling, theta 500000"});
  CHECK(groups({linear, theta_yarn}, standard) == Settings{"linear scaling, factor 2", "yarn scaling, factor 2"});
  CHECK(groups({linear, theta}, scaled) == Settings{"linear scaling, factor 2", "the base model's scaling"});
}

TEST_CASE("compare gives what eval perplexity gives") {
  const Setup setup;
  write_file(setup.path("eval.json"), R"({"contexts": [16, 24], "protocol": "blocks", "limit": 200})");
  REQUIRE(run(setup.words("out", {"--eval", setup.path("eval.json")})).exit == 0);
  const Json results = setup.results("out");
  CHECK(results["protocol"] == "blocks");
  CHECK(results["texts"][0]["tokens"] == 200);
  const RunResult alone =
      run({"eval", "perplexity", setup.path("runs/tape"), "--data", setup.path("data.tokens"), "--split", "held-out",
           "--limit", "200", "--protocol", "blocks", "--context", "16,24", "--threads", "1", "--json"});
  INFO(alone.err);
  REQUIRE(alone.exit == 0);
  const Json json = from_text(alone.out);
  CHECK(json["first_token"] == results["texts"][0]["first_token"]);
  for (std::size_t i = 0; i < 2; ++i) {
    CHECK(results["entries"][2]["perplexity"][0][i]["loss"] == json["results"][i]["loss"]);
  }
}

TEST_CASE("a comparison that is killed again and again ends as one that nobody disturbed") {
  const Setup setup;
  REQUIRE(run(setup.words("whole", {"--runs", setup.path("whole-runs")})).exit == 0);
  // A process writes some of the files that were there before, so that each must get further than the one before.
  const auto measured = [&] {
    std::error_code absent;
    const fs::directory_iterator files(setup.path("out/evaluations"), absent);
    return absent ? 0 : std::distance(begin(files), end(files));
  };
  const auto there = [&](const char* file) { return fs::exists(setup.path(file)); };
  int in_lora = 0, in_tape = 0, in_evaluation = 0;
  std::vector<std::string> words = setup.words("out");
  words.insert(words.begin(), "-q");
  for (int kill = 0; killed_at(fmt::format("{}:{}", kill % 2 == 0 ? "commit" : "committed", 2 * kill + 1), words);
       ++kill) {
    REQUIRE(kill < 50);
    ++(measured() > 0 ? in_evaluation : there("runs/tape") ? in_tape : in_lora);
  }
  CHECK(in_lora > 0);
  CHECK(in_tape > 0);
  CHECK(in_evaluation > 0);
  const RunResult last = run(setup.words("out"));
  INFO(last.err);
  REQUIRE(last.exit == 0);
  CHECK(setup.results("out") == setup.results("whole"));
  CHECK(read_file(setup.path("out/table.md")) == read_file(setup.path("whole/table.md")));
  for (const auto& entry : fs::directory_iterator(setup.path("out/evaluations"))) {
    CHECK(entry.path().extension() == ".json");
  }
}

TEST_CASE("compare: a model that changed is evaluated again") {
  const Setup setup;
  REQUIRE(run(setup.words("out", {"steps=2"})).exit == 0);
  const Json before = setup.results("out");
  REQUIRE(run(setup.words("out")).exit == 0);  // the same runs, longer
  const Json after = setup.results("out");
  CHECK(before["entries"][0]["perplexity"] == after["entries"][0]["perplexity"]);
  CHECK(before["entries"][1]["perplexity"] != after["entries"][1]["perplexity"]);
  const RunResult shorter = run(setup.words("out", {"steps=2"}));
  CHECK(shorter.exit == 1);
  CHECK_THAT(shorter.err, Contains("was trained for 6 steps, but the recipe asks for 2"));
}

TEST_CASE("compare refuses, before anything is trained, what cannot be compared") {
  const Setup setup;
  SECTION("another base model") {
    tiny_checkpoint(setup.model.folder / "other");
    const auto file = setup.model.folder / "other/model.safetensors";
    std::string bytes = read_file(file);
    bytes.back() = static_cast<char>(bytes.back() ^ 1);
    write_file(file, bytes);
    write_file(setup.path("tape.yaml"),
               fmt::format("model: {}\ndata: {}\nrun: {}\ncontext: 32\nadapter: tape\nsteps: 6\n"
                           "batch: 2\nheld_out: 0.1\n",
                           setup.path("other"), setup.path("data.tokens"), setup.path("runs/tape")));
    check_refused(setup, {}, "lora and tape start from different base models");
  }
  SECTION("the same weights elsewhere are the same model") {
    tiny_checkpoint(setup.model.folder / "copy");
    tiny_tokenizer(setup.model.folder / "copy");
    write_file(setup.path("tape.yaml"),
               fmt::format("model: {}\ndata: {}\nrun: {}\ncontext: 32\nadapter: tape\nsteps: 6\n"
                           "batch: 2\nheld_out: 0.1\n",
                           setup.path("copy"), setup.path("data.tokens"), setup.path("runs/tape")));
    CHECK(run(setup.words("out")).exit == 0);
  }
  SECTION("another order of the data") {
    setup.recipe("tape", "{method: tape}", "seed: 5\n");
    check_refused(setup, {}, "lora and tape differ in seed (0 and 5)");
  }
  SECTION("one run folder for both") {
    check_refused(setup, {"run=" + setup.path("runs/all")}, "have the same run folder");
  }
  SECTION("a recipe twice") {
    const RunResult twice = run({"compare", setup.path("lora.yaml"), setup.path("lora.yaml"), setup.path("lora.yaml"),
                                 "--out", setup.path("out")});
    CHECK(twice.exit == 1);
    CHECK_THAT(twice.err, Contains("given twice"));
  }
  SECTION("no data") { check_refused(setup, {"data=" + setup.path("nothing.tokens")}, "nothing.tokens"); }
  SECTION("nothing held out") { check_refused(setup, {"held_out=0"}, "all of it is used for training"); }
  SECTION("a context longer than the text") {
    write_file(setup.path("eval.yaml"), "contexts: [16, 4096]\n");
    check_refused(setup, {"--eval", setup.path("eval.yaml")}, "too few for one window of context 4096");
  }
  SECTION("a stride above a context") {
    write_file(setup.path("eval.yaml"), "contexts: [16]\nstride: 17\n");
    check_refused(setup, {"--eval", setup.path("eval.yaml")}, "the stride of 17 is larger than the context of 16");
  }
  SECTION("a text to measure on that is not there") {
    write_file(setup.path("eval.yaml"), "data: nothing.tokens\n");
    check_refused(setup, {"--eval", setup.path("eval.yaml")}, "nothing.tokens");
  }
  SECTION("no such file of what to measure") { check_refused(setup, {"--eval", setup.path("eval.yaml")}, "eval.yaml"); }
  SECTION("no recipe") {
    const RunResult none = run({"compare", "steps=2", "--out", setup.path("out")});
    CHECK(none.exit == 1);
    CHECK_THAT(none.err, Contains("no recipe given"));
  }
}

TEST_CASE("what to measure: every key, and what is wrong with its line") {
  const EvalPlan plan = parse_eval_plan(
      "data: [a.tokens, b.tokens]\ncontexts: [2048, 1024]\nprotocol: longlora\nstride: 128\nlimit: 5000\n"
      "passkey: {contexts: 512, depths: 3, trials: 2, seed: 9}\n",
      "eval.yaml");
  CHECK(plan.data == std::vector<std::string>{"a.tokens", "b.tokens"});
  CHECK(plan.contexts == std::vector<std::int64_t>{1024, 2048});
  CHECK(plan.protocol == Protocol::longlora);
  CHECK(plan.stride == 128);
  CHECK(plan.limit == 5000);
  REQUIRE(plan.passkey);
  CHECK(plan.passkey->contexts == std::vector<std::int64_t>{512});
  CHECK(plan.passkey->trials == 2);
  CHECK(plan.passkey->seed == 9);
  CHECK(parse_eval_plan("", "eval.yaml").contexts.empty());

  CHECK_THAT(refused_plan("limit: 3\ncontext: [16]\n"),
             Contains("eval.yaml:2: unknown key \"context\"") && Contains("did you mean contexts?"));
  CHECK_THAT(refused_plan("contexts: [16, 16]\n"), Contains("eval.yaml:1: contexts has 16 twice"));
  CHECK_THAT(refused_plan("contexts: [16, many]\n"), Contains("a whole number, at least 2, but is \"many\""));
  CHECK_THAT(refused_plan("contexts: []\n"), Contains("a value or a list"));
  CHECK_THAT(refused_plan("protocol: slidng\n"),
             Contains("eval.yaml:1: there is no protocol \"slidng\"") && Contains("did you mean sliding?"));
  CHECK_THAT(refused_plan("stride: 0\n"), Contains("at least 1"));
  CHECK_THAT(refused_plan("limit: -3\n"), Contains("at least 1"));
  CHECK_THAT(refused_plan("limit: 3\nlimit: 4\n"), Contains("twice"));
  CHECK_THAT(refused_plan("passkey: 3\n"), Contains("passkey must be a map"));
  CHECK_THAT(refused_plan("passkey: {depth: 3}\n"), Contains("did you mean depths?"));
  CHECK_THAT(refused_plan("- 16\n"), Contains("must be a map"));
  CHECK_THAT(refused_plan("contexts: [16\n"), Contains("not YAML"));
}

}  // namespace compare_test
