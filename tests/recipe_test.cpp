// Recipes: everything that is wrong is said at once with its line, settings go over files, and a resolved one reads
// back.
#include "recipe/recipe.h"

#include <unistd.h>

#include <set>

#include "adapters/build_model.h"
#include "catch.h"
#include "core/error.h"
#include "recipe/shipped.h"
#include "recipe/yaml.h"
#include "support.h"

namespace recipe_test {

using namespace tapetune;
using namespace tapetune::test;
namespace fs = std::filesystem;

namespace {

// A right recipe of eight lines.
constexpr const char* right =
    "model: base\n"
    "data: a.tokens\n"
    "run: runs/x\n"
    "context: 64\n"
    "adapter: {method: lora}\n"
    "steps: 10\n"
    "batch: 4\n"
    "micro_batch: 2\n";

constexpr const char* scratch =
    "model: {init: random, hidden: 32, layers: 2, heads: 4, kv_heads: 2, ffn: 64, vocab: 61}\n"
    "data: a.tokens\n"
    "run: runs/x\n"
    "context: 64\n"
    "steps: 10\n";

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

Recipe with(const std::vector<std::string>& words, const std::string& text = right) {
  return parse_recipe(text, "r.yaml", words);
}

// A value for every key that differs from what `right` and `scratch` have.
const std::map<std::string, std::string> others{{"model", "other"},
                                                {"model.init", "random"},
                                                {"model.hidden", "64"},
                                                {"model.layers", "3"},
                                                {"model.heads", "8"},
                                                {"model.kv_heads", "1"},
                                                {"model.head_dim", "16"},
                                                {"model.ffn", "65"},
                                                {"model.vocab", "62"},
                                                {"model.norm_eps", "1e-06"},
                                                {"model.tied", "true"},
                                                {"model.tokenizer", "somewhere"},
                                                {"data", "[a.tokens, {path: b c.tokens, weight: 2.5}]"},
                                                {"model_hash", "blake3-00"},
                                                {"run", "runs/y"},
                                                {"context", "128"},
                                                {"method", "theta-scaling"},
                                                {"positions.encoding", "rope"},
                                                {"positions.mix", "per-head"},
                                                {"positions.width", "2"},
                                                {"positions.random_offset", "true"},
                                                {"positions.equivariant", "false"},
                                                {"positions.scaling", "none"},
                                                {"positions.factor", "2"},
                                                {"positions.theta", "500000"},
                                                {"adapter.type", "none"},
                                                {"adapter.rank", "16"},
                                                {"adapter.alpha", "32"},
                                                {"adapter.dropout", "0.1"},
                                                {"adapter.targets", "[q, v]"},
                                                {"adapter.layers_to_transform", "[0, 2]"},
                                                {"adapter.exclude_modules", "[layers.0.self_attn.q_proj]"},
                                                {"adapter.rslora", "true"},
                                                {"adapter.dora", "true"},
                                                {"attention.pattern", "shifted"},
                                                {"attention.group", "16"},
                                                {"attention.window", "none"},
                                                {"train_also", "[embeddings, lm_head]"},
                                                {"untie", "true"},
                                                {"init_from", "adapters/x"},
                                                {"steps", "11"},
                                                {"batch", "8"},
                                                {"micro_batch", "4"},
                                                {"optimizer.lr", "0.0003"},
                                                {"optimizer.betas", "[0.8, 0.95]"},
                                                {"optimizer.eps", "1e-06"},
                                                {"optimizer.weight_decay", "0.01"},
                                                {"optimizer.clip", "0"},
                                                {"schedule.kind", "linear"},
                                                {"schedule.warmup", "5"},
                                                {"schedule.min_lr", "1e-06"},
                                                {"dtype", "bf16"},
                                                {"checkpointing", "selective"},
                                                {"shard", "base"},
                                                {"sequence_parallel", "2"},
                                                {"save_every", "7"},
                                                {"keep", "3"},
                                                {"held_out", "0.25"},
                                                {"eval_every", "5"},
                                                {"eval_windows", "6"},
                                                {"log_every", "10"},
                                                {"seed", "123456789012345678"}};

// The settings that a key needs to be allowed at all.
std::vector<std::string> company(const std::string& key) {
  if (key == "attention.group") return {"method=longlora"};
  if (key == "positions.mix" || key == "positions.width" || key == "positions.random_offset" ||
      key == "positions.equivariant")
    return {"method=tape"};
  if (key == "schedule.min_lr") return {"schedule.kind=cosine"};
  if (key == "eval_every") return {"held_out=0.5"};
  return {};
}

const char* base_of(const std::string& key) { return key.rfind("model.", 0) == 0 ? scratch : right; }

}  // namespace

TEST_CASE("recipe: every shipped one is right, says how it is run and reads back as resolved") {
  const fs::path folder = fs::path(source_folder) / "recipes";
  std::set<std::string> names, runs;
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.path().extension() != ".yaml") continue;
    const std::string name = entry.path().lexically_relative(folder).replace_extension().generic_string();
    INFO(name);
    names.insert(name);
    const Recipe recipe = read_recipe(entry.path());
    CHECK(runs.insert(recipe.run).second);
    const std::string text = read_file(entry.path());
    CHECK(text.rfind("# tapetune train recipes/" + name + ".yaml model" + (recipe.init ? "." : "="), 0) == 0);
    CHECK(recipe_yaml(parse_recipe(recipe_yaml(recipe), name)) == recipe_yaml(recipe));
  }
  for (const std::string method : {"lora", "longlora", "theta-scaling", "tape", "tape-lora"}) {
    for (const std::string of : {"llama2-7b-8k/", "smollm2-16k/", "stories-2k/"}) CHECK(names.count(of + method) == 1);
    if (method != "tape-lora") CHECK(names.count("quickstart/" + method) == 1);
  }
  CHECK(names.count("quickstart/base") == 1);
  CHECK(names.count("llama2-7b-8k/tape-yarn") == 1);
  CHECK(names.count("llama2-7b-8k/full") == 1);
}

TEST_CASE("recipe: those of the papers have the papers' settings") {
  const fs::path folder = fs::path(source_folder) / "recipes" / "llama2-7b-8k";
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() != ".yaml") continue;
    INFO(entry.path());
    const Recipe r = read_recipe(entry.path());
    CHECK(r.context == 8192);
    CHECK(r.batch == 64);
    CHECK(r.steps == 1000);
    CHECK(r.optimizer.lr == 2e-5);
    CHECK(r.optimizer.beta1 == 0.9);
    CHECK(r.optimizer.beta2 == 0.999);
    CHECK(r.optimizer.weight_decay == 0);
    CHECK(r.schedule.kind == "constant");
    CHECK(r.schedule.warmup == 50);
    CHECK(r.method.factor == 2.0);
    CHECK(r.method.scaling == (entry.path().stem() == "tape-yarn" ? RopeType::yarn : RopeType::linear));
    CHECK(r.method.theta.has_value() == (entry.path().stem() == "theta-scaling"));
    const bool full = r.method.preset == "full";
    CHECK(r.method.train_also.all == full);
    CHECK(r.method.train_also.embeddings == !full);
    CHECK(r.method.train_also.norms == !full);
    if (full || entry.path().stem() == "tape" || entry.path().stem() == "tape-yarn") continue;
    CHECK(r.method.adapter.whole("rank") == 8);
    CHECK(r.method.adapter.number("alpha") == 16);
  }
  CHECK(read_recipe(folder / "tape.yaml").method.adapter.type == "none");
}

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

TEST_CASE("recipe: resolved, it has every key and reads back the same") {
  const Recipe plain = with({});
  const std::string resolved = recipe_yaml(plain, std::vector<std::string>{"tapetune 0.1.0"});
  CHECK(resolved ==
        "# tapetune 0.1.0\n"
        "model: base\n"
        "model_hash: null\n"
        "data: a.tokens\n"
        "run: runs/x\n"
        "context: 64\n"
        "method: lora\n"
        "positions:\n"
        "  encoding: model\n"
        "  scaling: null\n"
        "  factor: null\n"
        "  theta: null\n"
        "adapter:\n"
        "  type: lora\n"
        "  rank: 8\n"
        "  alpha: 16\n"
        "  dropout: 0\n"
        "  targets: [q, k, v, o]\n"
        "  layers_to_transform: null\n"
        "  exclude_modules: null\n"
        "  rslora: false\n"
        "  dora: false\n"
        "attention:\n"
        "  pattern: full\n"
        "  window: model\n"
        "train_also: []\n"
        "untie: false\n"
        "init_from: null\n"
        "steps: 10\n"
        "batch: 4\n"
        "micro_batch: 2\n"
        "optimizer:\n"
        "  lr: 2e-05\n"
        "  betas: [0.9, 0.999]\n"
        "  eps: 1e-08\n"
        "  weight_decay: 0\n"
        "  clip: 1\n"
        "schedule:\n"
        "  kind: constant\n"
        "  warmup: 0\n"
        "  min_lr: 0\n"
        "dtype: auto\n"
        "checkpointing: full\n"
        "shard: none\n"
        "sequence_parallel: 1\n"
        "save_every: 100\n"
        "keep: 2\n"
        "held_out: 0\n"
        "eval_every: 0\n"
        "eval_windows: 0\n"
        "log_every: 1\n"
        "seed: 0\n");
  CHECK(differences(plain, parse_recipe(resolved, "resolved")).empty());

  // Every key with another value: it is in the resolved text, comes back, and is the difference.
  for (const RecipeKey& key : recipe_keys()) {
    // Which other keys there are depends on these.
    const bool chooses = key.name == "method" || key.name == "adapter.type" || key.name == "attention.pattern";
    if (key.name == "model.init" || chooses || key.name == "schedule.kind") continue;
    INFO(key.name);
    const Recipe before = with(company(key.name), base_of(key.name));
    std::vector<std::string> words = company(key.name);
    words.push_back(key.name + "=" + others.at(key.name));
    const Recipe after = with(words, base_of(key.name)), again = parse_recipe(recipe_yaml(after), "resolved");
    CHECK(differences(after, again).empty());
    CHECK(recipe_yaml(after) == recipe_yaml(again));
    const std::vector<RecipeDifference> found = differences(before, after);
    const auto own = std::find_if(found.begin(), found.end(), [&](const auto& d) { return d.key == key.name; });
    REQUIRE(own != found.end());
    const bool implied = key.name == "positions.factor" || key.name.rfind("model.", 0) == 0;  // scaling, head_dim
    CHECK((implied || found.size() == 1));
    CHECK(own->affects_result == (key.affects_result && key.name != "steps"));
    if (key.name != "data") CHECK(own->after == others.at(key.name));
  }
  for (const Preset& preset : presets()) {
    if (preset.name == "none") continue;
    const Recipe r = with({"adapter=" + std::string(preset.name)});
    CHECK(method_json(r.method) == method_json(parse_method(preset.name, {})));
    CHECK(differences(r, parse_recipe(recipe_yaml(r), "resolved")).empty());
  }
}

TEST_CASE("recipe: texts of any kind survive being written") {
  for (const std::string text : {"plain",
                                 "with space",
                                 "null",
                                 "~",
                                 "- dash",
                                 "-x",
                                 "a: b",
                                 "a #b",
                                 "[x]",
                                 "{x}",
                                 "*x",
                                 "&x",
                                 "!x",
                                 "%x",
                                 "@x",
                                 "'single'",
                                 "\"double\"",
                                 "back\\slash",
                                 "tab\tnewline\nend",
                                 "ünïcödé",
                                 "yes",
                                 "0x10",
                                 " edges ",
                                 "a,b",
                                 "|",
                                 "?",
                                 "\x01\x7f"}) {
    INFO(text);
    Recipe r = with({});
    r.run = text;
    r.data = {{text, 1}, {text + "2", 2}};
    const Recipe again = parse_recipe(recipe_yaml(r), "resolved");
    CHECK(again.run == text);
    REQUIRE(again.data.size() == 2);
    CHECK(again.data[0].path == text);
    CHECK(again.data[1].path == text + "2");
  }
}

TEST_CASE("recipe: differences tell what may change when a run is resumed") {
  const Recipe a = with({});
  const auto found = differences(a, with({"run=elsewhere", "seed=1", "save_every=5", "optimizer.lr=1"}));
  REQUIRE(found.size() == 4);
  CHECK(found[0].key == "run");
  CHECK_FALSE(found[0].affects_result);
  CHECK(found[1].key == "optimizer.lr");
  CHECK(found[1].before == "2e-05");
  CHECK(found[1].after == "1");
  CHECK(found[1].affects_result);
  CHECK_FALSE(found[2].affects_result);
  CHECK(found[3].key == "seed");
  // More steps of a constant rate go on where fewer ended; a course to an end is another one.
  CHECK_FALSE(differences(a, with({"steps=20"}))[0].affects_result);
  CHECK(differences(with({"schedule=cosine"}), with({"schedule=cosine", "steps=20"}))[0].affects_result);
  // Settings that only one of the two methods has.
  const auto methods = differences(a, with({"adapter={method: longlora}"}));
  REQUIRE(methods.size() == 3);
  CHECK(methods[0].key == "method");
  CHECK(methods[1].key == "attention.pattern");
  CHECK(methods[2].key == "attention.group");
  CHECK(methods[2].before == "nothing");
}

TEST_CASE("recipe: a model from scratch has a config") {
  const Recipe r = with({"positions={scaling: linear, factor: 4}", "adapter=lora"}, scratch);
  const ModelConfig config = random_model_config(r);
  CHECK(config.hidden_size == 32);
  CHECK(config.head_dim == 8);
  CHECK(config.kv_heads == 2);
  CHECK(config.context == 16);  // which the scaling stretches to 64
  CHECK(with({}, scratch).method.preset == "full");
  CHECK(parse_config(write_config(config, "float32"), "config.json").vocab_size == 61);
}

TEST_CASE("recipes: ls, show, cp, validate and keys") {
  const RunResult list = run({"recipes", "ls"});
  CHECK(list.exit == 0);
  CHECK_THAT(list.out, Contains("llama2-7b-8k/tape ") && Contains("TAPE on Llama-2 7B, 4096 to 8192 tokens"));
  CHECK(lines_of(list.out).size() == list_recipes().size());

  const RunResult shown = run({"recipes", "show", "stories-2k/lora", "steps=7", "optimizer.lr=1e-4"});
  CHECK(shown.exit == 0);
  CHECK(parse_recipe(shown.out, "shown").steps == 7);
  // As DESIGN.md's commands name them, from any folder.
  CHECK(run({"recipes", "show", "recipes/stories-2k/lora.yaml", "steps=7", "optimizer.lr=1e-4"}).out == shown.out);
  CHECK_THAT(run({"recipes", "show", "stories-2k/lroa"}).err, Contains("did you mean stories-2k/lora?"));
  CHECK(run({"recipes", "show", "stories-2k/lora", "stpes=7"}).exit == 1);

  const TempFolder folder;
  // A folder of the user's that happens to have a recipe's name does not hide it.
  fs::create_directories(folder / "stories-2k/lora");
  const auto there = [&] {
    if (::chdir(folder.path().c_str()) != 0) ::_exit(99);
  };
  CHECK(run({"recipes", "show", "stories-2k/lora", "steps=7", "optimizer.lr=1e-4"}, there).out == shown.out);
  const std::string mine = (folder / "mine.yaml").string();
  CHECK(run({"recipes", "cp", "stories-2k/tape", mine}).exit == 0);
  CHECK(read_file(mine) == read_file(find_recipe("stories-2k/tape")));
  CHECK(run({"recipes", "cp", "stories-2k/tape", mine}).exit == 1);
  CHECK(run({"recipes", "cp", "stories-2k/tape", mine, "--force"}).exit == 0);
  CHECK(run({"recipes", "cp", "stories-2k/tape", folder.path().string()}).exit == 0);
  CHECK(fs::exists(folder / "tape.yaml"));

  const RunResult good = run({"recipes", "validate", mine, "llama2-7b-8k/full", "steps=3"});
  CHECK(good.exit == 0);
  CHECK(good.err.empty());
  CHECK_THAT(good.out, Contains("mine.yaml: ok (tape, 3 steps of 4 x 2048 tokens)") && Contains("full: ok"));
  write_file(folder / "bad.yaml", std::string(right) + "seed: x\nkeep: 0\n");
  const std::string bad = (folder / "bad.yaml").string();
  const RunResult wrong = run({"recipes", "validate", bad, mine, "stpes=3"});
  CHECK(wrong.exit == 1);
  CHECK(wrong.out.empty());
  const std::vector<std::string> found = lines_of(wrong.err);
  REQUIRE(found.size() == 4);
  for (const std::string& line : found) CHECK(line.rfind("error: [recipe] ", 0) == 0);
  CHECK_THAT(found[0], Contains(bad + ":9: seed must be"));
  CHECK_THAT(found[1], Contains(bad + ":10: keep must be"));
  CHECK_THAT(found[2], Contains("stpes"));
  CHECK_THAT(found[3], Contains("stpes"));

  const RunResult keys = run({"recipes", "keys"});
  CHECK(lines_of(keys.out).size() == recipe_keys().size() + 1);
  for (const std::string& line : lines_of(keys.out)) {
    if (line.starts_with("model_hash ")) CHECK_THAT(line, Contains(" null ") && !Contains("required"));
    if (line.starts_with("steps ")) CHECK_THAT(line, Contains("required") && Contains("(>= 1)"));
  }
  CHECK(from_text(run({"recipes", "keys", "--json"}).out).size() == recipe_keys().size());
  for (const char* verb : {"ls", "show", "cp", "validate", "keys"}) {
    CHECK_THAT(run({"recipes", verb, "--help"}).out, Contains(std::string("example: tapetune recipes ") + verb));
  }
  const RunResult nowhere = run({"recipes", "ls"}, [] { ::setenv("TAPETUNE_RECIPES", "/nowhere", 1); });
  CHECK(nowhere.exit == 1);
  CHECK_THAT(nowhere.err, Contains("TAPETUNE_RECIPES=/nowhere is not a folder"));
  const std::string other = folder.path().string();
  CHECK_THAT(run({"recipes", "ls"}, [&] { ::setenv("TAPETUNE_RECIPES", other.c_str(), 1); }).out, Contains("mine"));
}

}  // namespace recipe_test
