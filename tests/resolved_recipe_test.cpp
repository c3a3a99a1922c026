// Resolved recipes: every key, texts that survive, and what may differ when a run is resumed.
#include "recipe/recipe.h"

#include "adapters/build_model.h"
#include "catch.h"
#include "recipe_texts.h"
#include "support.h"

namespace resolved_recipe_test {

using namespace tapetune;
using namespace tapetune::test;
using namespace tapetune::test::recipes;
namespace fs = std::filesystem;

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

}  // namespace resolved_recipe_test
