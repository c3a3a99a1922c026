// The shipped recipes, and the command that lists, shows, copies and checks recipes.
#include "recipe/recipe.h"

#include <unistd.h>

#include <set>

#include "catch.h"
#include "recipe/shipped.h"
#include "recipe_texts.h"
#include "support.h"

namespace shipped_recipes_test {

using namespace tapetune;
using namespace tapetune::test;
using namespace tapetune::test::recipes;
namespace fs = std::filesystem;

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

}  // namespace shipped_recipes_test
