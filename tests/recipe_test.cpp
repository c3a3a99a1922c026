// Recipes: everything that is wrong is said at once with its line, and settings go over files.
#include "recipe/recipe.h"

#include "catch.h"
#include "core/error.h"
#include "recipe_texts.h"
#include "support.h"

namespace recipe_test {

using namespace tapetune;
using namespace tapetune::test;
using namespace tapetune::test::recipes;
namespace fs = std::filesystem;

namespace {

// What is said about it, a line each; nothing where it is right.
std::vector<std::string> problems(const std::string& text, const std::vector<std::string>& words = {}) {
  try {
    parse_recipe(text, "r.yaml", words);
  } catch (const Error& error) {
    return lines_of(error.what());
  }
  return {};
}

// One problem, which has this in its line.
void refused(const std::string& text, const std::string& part, const std::vector<std::string>& words = {}) {
  const std::vector<std::string> found = problems(text, words);
  INFO(text << part << "\n" << fmt::format("{}", fmt::join(found, "\n")));
  REQUIRE(found.size() == 1);
  CHECK_THAT(found[0], Contains(part));
  CHECK(found[0].rfind("[recipe] ", 0) == 0);
}

}  // namespace

TEST_CASE("recipe: five errors in one file are all reported with their lines") {
  const std::vector<std::string> found = problems(
      "# a comment\n"
      "model: base\n"
      "data: a.tokens\n"
      "run: runs/x\n"
      "contxt: 64\n"  // 5: unknown, and so context is missing: 1
      "adapter:\n"
      "  method: lora\n"
      "  rank: eight\n"  // 8: wrong type
      "steps: 0\n"       // 9: out of range
      "optimizer:\n"
      "  lr: 1e-4\n"
      "  wieght_decay: 0.1\n"  // 12: unknown in a section
      "batch: 64\n"
      "micro_batch: 0\n");  // 14: out of range
  REQUIRE(found.size() == 6);
  CHECK(found[0] == "[recipe] r.yaml:1: context is missing: tokens per training sequence.");
  CHECK(found[1] == "[recipe] r.yaml:5: unknown key \"contxt\" (did you mean context?).");
  CHECK(found[2] == "[recipe] r.yaml:8: adapter.rank must be an integer >= 1, but is \"eight\".");
  CHECK(found[3] == "[recipe] r.yaml:9: steps must be an integer >= 1, but is \"0\".");
  CHECK(
      found[4] ==
      "[recipe] r.yaml:12: unknown key \"optimizer.wieght_decay\"; optimizer takes lr, betas, eps, weight_decay, clip "
      "(did you mean weight_decay?).");
  CHECK(found[5] == "[recipe] r.yaml:14: micro_batch must be an integer >= 1, but is \"0\".");
}

TEST_CASE("recipe: files that are not recipes") {
  refused("- a\n- b\n", "r.yaml:1: a recipe is a map of keys, as \"steps: 1000\", but this is a list.");
  refused("just words\n", "but this is \"just words\"");
  refused("", "but this is empty");
  refused("# only a comment\n", "but this is empty");
  refused("model: base\nsteps: [1, 2\nrun: x\n", "not YAML");
  refused("model: base\nsteps: 1\n  batch: 2\n", "r.yaml:3: not YAML");
  refused("model: base\nrun: {x\n", "not YAML");
  refused(std::string(right) + "---\nmodel: other\n", "r.yaml:9: a second document");
  refused(std::string(right) + "? [a, b]\n: c\n", "r.yaml:9: a key must be a word");
  refused(", a\nmodel: base\n", "r.yaml:1: not YAML");  // yaml-cpp's LoadAll never ends on it
  refused("model: &a [*a]\n", "nested too deeply");
  std::string wide = "a: &a [x, x, x, x, x, x, x, x, x, x]\n";
  for (char c = 'b'; c < 'h'; ++c)
    wide += fmt::format("{0}: &{0} [*{1}, *{1}, *{1}, *{1}, *{1}, *{1}, *{1}, *{1}, *{1}, *{1}]\n", c, char(c - 1));
  refused(wide, "nested too deeply");
  refused(std::string(100'000, '['), "not YAML");

  const TempFolder folder;
  CHECK_THROWS_WITH(read_recipe(folder.path()), Contains("a folder; give a YAML file"));
  CHECK_THROWS_WITH(read_recipe(folder / "none.yaml"), Contains("none.yaml"));
  write_file(folder / "big", std::string((1 << 20) + 1, ' '));
  CHECK_THROWS_WITH(read_recipe(folder / "big"), Contains("too many for a recipe"));
}

TEST_CASE("recipe: keys that are unknown or in the wrong place say which was meant") {
  refused(std::string(right) + "stpes: 3\n", "r.yaml:9: unknown key \"stpes\" (did you mean steps?)");
  refused(std::string(right) + "lr: 1e-4\n", "(did you mean optimizer.lr?)");
  refused(std::string(right) + "rank: 4\n", "(did you mean adapter.rank?)");
  refused(std::string(right) + "qqqqqqqqqqqqqqqqqq: 1\n", "\"tapetune recipes keys\" lists all");
  refused(std::string(right) + "\"\": 1\n", "unknown key \"\"");
  refused(std::string(right) + "schedule: {kidn: cosine}\n", "(did you mean kind?)");
  refused(std::string(right) + "steps: 11\n", "r.yaml:9: steps is given twice; the first is on line 6.");
  refused(right, "scaling does not belong under adapter; write positions.scaling", {"adapter.scaling=linear"});
  refused(right, "method lora has no setting \"rnak\"; it takes type, rank, alpha", {"adapter.rnak=4"});
  refused(right, "(did you mean rank?)", {"adapter.rnak=4"});
  refused(right, "there is no method \"lroa\"", {"adapter.method=lroa"});
  // An unknown method does not make its settings wrong.
  refused(right, "(did you mean longlora?)", {"adapter={method: longlra, group: 0.5}"});
}

TEST_CASE("recipe: every key refuses what is not of its kind, by name") {
  CHECK(others.size() == recipe_keys().size());
  for (const RecipeKey& key : recipe_keys()) {
    INFO(key.name);
    CHECK_FALSE(key.help.empty());
    CHECK_FALSE(key.type.empty());
    std::vector<std::string> values{"{a: [b]}", "[[a]]"};
    if (key.type != "folder" && key.type != "file or list") values.insert(values.end(), {"certainly not", "-1", ""});
    if (key.type == "whole number") values.insert(values.end(), {"1.5", "1e3", "99999999999999999999", "8 "});
    if (key.type == "number") values.insert(values.end(), {"nan", "inf", "0x10", "1,5"});
    if (key.type == "list") std::erase(values, "");
    if (key.name == "optimizer.betas") values.insert(values.end(), {"[0.9]", "[0.9, 1]", "[0.9, a]", "0.9,0.9,0.9"});
    if (key.name == "data") values.insert(values.end(), {"[]", "[{weight: 2}]", "[{path: a, weight: 0}]", "[a, a]"});
    for (const std::string& value : values) {
      if (key.name == "model" && value[0] == '{') continue;  // its own keys
      std::vector<std::string> words = company(key.name);
      words.push_back(key.name + "=" + value);
      INFO(value);
      const std::vector<std::string> found = problems(base_of(key.name), words);
      REQUIRE(found.size() == 1);
      CHECK(found[0].rfind("[recipe] command line: ", 0) == 0);
      const std::string last = key.name.substr(key.name.rfind('.') + 1);
      CHECK_THAT(found[0], Contains(last) || Contains("there is no method"));
    }
  }
  for (const std::string section : {"positions", "optimizer"})
    refused(right, section + " must be a map of", {section + "=3"});
  refused(std::string(right) + "optimizer: [1]\n", "r.yaml:9: optimizer must be a map of lr, betas");
  refused(std::string(right) + "seed:\n", "r.yaml:9: seed has no value; give one, or remove the key.");
  refused(std::string(right) + "dtype: bf61\n", "(did you mean bf16?)");
  refused("model: base\ndata: a\nrun: b\ncontext: 8\nsteps: 1\nadapter:\n  method:\n", "r.yaml:7: method must be");
}

TEST_CASE("recipe: what cannot be together") {
  refused(right, "positions.scaling=linear needs a factor", {"positions.scaling=linear"});
  refused(right, "positions.scaling=none takes no factor", {"positions.scaling=none", "positions.factor=2"});
  CHECK(with({"adapter={method: full, rank: 4}"}).method.adapter.whole("rank") == 4);
  refused(right, "adapter.dora needs frozen weights, but train_also has all of them",
          {"adapter={method: full, rank: 4, dora: true}"});
  refused(right, "train_also: method full trains everything already", {"adapter=full", "train_also=norms"});
  refused(right, "method none has no trainable parameters", {"adapter=none"});
  refused(right, R"(adapter.rank must be an integer >= 1, but is "0")", {"adapter.rank=0"});
  refused(right, "method lora has no setting \"group\"", {"adapter.group=0.5"});
  refused(right, "command line: method tape has no LoRA matrices unless it is given a rank",
          {"adapter={method: tape, dora: true}"});
  for (const std::string group : {"0.3", "24", "2.5", "1", "0.015625", "128"}) {
    refused(right, "which do not fit context 64", {fmt::format("adapter={{method: longlora, group: {}}}", group)});
  }
  for (const std::string group : {"0.25", "0.5", "16", "64", "2"}) {
    CHECK(problems(right, {fmt::format("adapter={{method: longlora, group: {}}}", group)}).empty());
  }
  refused(right, "schedule.warmup 10 leaves nothing of 10 steps", {"schedule={kind: cosine, warmup: 10}"});
  CHECK(problems(right, {"schedule.warmup=20"}).empty());
  refused(right, "schedule.min_lr has no effect in a constant schedule", {"schedule.min_lr=1e-6"});
  refused(right, "schedule.min_lr 1 is above optimizer.lr", {"schedule={kind: cosine, min_lr: 1}"});
  refused(right, "eval_every asks for evaluations, but held_out keeps no data", {"eval_every=5"});
  refused(scratch, "model.kv_heads 3 does not divide model.heads 4", {"model.kv_heads=3"});
  refused(scratch, "model.heads 5 does not divide model.hidden 32", {"model.heads=5", "model.kv_heads=5"});
  refused(scratch, "a head is 7 wide", {"model.head_dim=7"});
  refused(scratch, "half of the heads have shifted groups, but the model has 1",
          {"model.heads=1", "model.kv_heads=1", "adapter=longlora"});
  refused(scratch, "model.hidden is missing", {"model={init: random, layers: 2, heads: 4, ffn: 8, vocab: 9}"});
  refused(
      "model: base\ndata: a\nrun: b\ncontext: 8\nsteps: 1\nmodel.init: random\nmodel.hidden: 8\nmodel.layers: 1\n"
      "model.heads: 2\nmodel.ffn: 8\nmodel.vocab: 9\n",
      "r.yaml:1: model is both a folder and a map of keys");
  refused("data: a\nrun: b\ncontext: 8\nsteps: 1\nadapter: lora\n", "model is missing");
  refused("model: m\ndata: a\nrun: b\ncontext: 8\nsteps: 1\n", "method is missing");
}

TEST_CASE("recipe: settings go over the file, with the same checks") {
  const Recipe r = with({"steps=20", "optimizer.lr=1e-4", "adapter.rank=16", "train_also=embeddings,norms",
                         "adapter.targets=[q, v]", "model=/with space/and=sign", "data=[a, {path: b, weight: 3}]",
                         "positions.factor=2", "optimizer.betas=0.8,0.9", "steps=30"});
  CHECK(r.steps == 30);
  CHECK(r.optimizer.lr == 1e-4);
  CHECK(r.optimizer.beta2 == 0.9);
  CHECK(r.method.adapter.whole("rank") == 16);
  CHECK(r.method.train_also.embeddings);
  CHECK((r.method.adapter.words("targets") == std::vector<std::string>{"q", "v"}));
  CHECK(r.method.scaling == RopeType::linear);  // what a factor alone means
  CHECK(r.model == "/with space/and=sign");
  REQUIRE(r.data.size() == 2);
  CHECK(r.data[1].path == "b");
  CHECK(r.data[1].weight == 3);

  refused(right, "command line: unknown key \"stpes\" (did you mean steps?)", {"stpes=20"});
  refused(right, "command line: unknown key \"optimizer.rl\"", {"optimizer.rl=20"});
  refused(right, "command line: steps must be an integer >= 1, but is \"ten\"", {"steps=ten"});
  refused(right, "command line: steps must be at most 2147483648, but is \"9000000000\"", {"steps=9000000000"});
  refused(right, "command line: adapter.rank must be at most 65536, but is \"70000\"", {"adapter.rank=70000"});
  refused(right, "command line: model must be a folder whose path is UTF-8", {"model=bad\xffname"});
  refused(right, "\"fast\" is not a setting; write key=value", {"fast"});
  refused(right, "\"=3\" is not a setting", {"=3"});
  refused(right, "data is not YAML", {"data=[a"});
  CHECK(problems(right, {"stpes=1", "micro_batch=0", "dtype=f61"}).size() == 3);
  // A wrong value that a setting replaces does not matter.
  CHECK(problems(std::string(right) + "seed: x\n", {"seed=3"}).empty());

  // A section is replaced as a whole; null is what holds without the key.
  const std::string long_one = std::string(right) + "schedule: {kind: linear, warmup: 3, min_lr: 1e-6}\n";
  CHECK(with({"schedule={warmup: 2}"}, long_one).schedule.kind == "constant");
  CHECK(with({"schedule=cosine"}, long_one).schedule.warmup == 3);
  CHECK(with({"schedule.warmup=null"}, long_one).schedule.warmup == 0);
  CHECK(with({"schedule=null"}, long_one).schedule.min_lr == 0);
  const std::string scaled = std::string(right) + "positions: {scaling: linear, factor: 4}\n";
  const Recipe unscaled = with({"positions.scaling=none", "positions.factor=null"}, scaled);
  CHECK(unscaled.method.scaling == RopeType::standard);
  CHECK_FALSE(unscaled.method.factor);
  CHECK_FALSE(with({"positions=null"}, scaled).method.scaling);
  CHECK(with({"adapter=tape"}, std::string(right)).method.adapter.type == "none");
  refused(right, "method tape has no setting \"group\"", {"adapter.method=tape", "adapter.group=4"});
  CHECK(problems(right, {"model=null"}).size() == 1);

  // From a folder to training from scratch and back.
  const Recipe from_scratch = with({"model={init: random, hidden: 8, layers: 1, heads: 2, ffn: 8, vocab: 9}"});
  CHECK(from_scratch.model.empty());
  REQUIRE(from_scratch.init);
  CHECK(from_scratch.init->kv_heads == 2);
  CHECK(from_scratch.init->head_dim == 4);
  CHECK_FALSE(with({"model=base", "adapter=lora"}, scratch).init);
}

}  // namespace recipe_test
