// compare: what it refuses and why, that nothing measured is lost, and the charts' arithmetic.
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <random>
#include <thread>

#include "catch.h"
#include "core/error.h"
#include "core/json.h"
#include "data/token_file.h"
#include "report/chart.h"
#include "report/comparison.h"
#include "report/eval_file.h"
#include "report/page.h"
#include "support.h"

using namespace tapetune;
using namespace tapetune::test;
namespace fs = std::filesystem;

namespace {

// A tiny model, a token file, and recipes of two methods over them.
struct Setup {
  Setup() {
    TokenFileInfo info;
    info.vocabulary_hash = read_vocabulary(model.folder / "m").hash;
    info.vocabulary_size = 61;
    TokenFileWriter writer(path("data.tokens"), false, info);
    std::mt19937 random(4);
    for (int i = 0; i < 4000; ++i) writer.append(random() % 58 + 3);
    writer.end_document();
    writer.commit();
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

TEST_CASE("compare trains, measures and reports; a second call measures nothing again") {
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
  CHECK(results["differences"]["adapter.method"] == from_text(R"(["lora", "tape"])"));

  const RunResult second = run(setup.words("out"));
  CHECK(second.exit == 0);
  CHECK(second.out == first.out);
  CHECK_THAT(second.err, Contains("lora is trained") && !Contains("training") && !Contains("perplexity at"));
  CHECK(setup.results("out") == results);
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
  int killed = 0;
  for (int after = 150; after < 1200; after += 150) {
    const pid_t child = ::fork();
    if (child == 0) {
      std::vector<std::string> words = setup.words("out");
      words.insert(words.begin(), tapetune_binary);
      std::vector<char*> arguments;
      for (std::string& word : words) arguments.push_back(word.data());
      arguments.push_back(nullptr);
      std::freopen("/dev/null", "w", stderr);
      std::freopen("/dev/null", "w", stdout);
      ::execv(tapetune_binary, arguments.data());
      ::_exit(127);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(after));
    ::kill(child, SIGKILL);
    int status = 0;
    ::waitpid(child, &status, 0);
    killed += WIFSIGNALED(status) ? 1 : 0;
  }
  CHECK(killed > 0);  // or nothing is shown
  const RunResult last = run(setup.words("out"));
  INFO(last.err);
  REQUIRE(last.exit == 0);
  CHECK(setup.results("out") == setup.results("whole"));
  CHECK(read_file(setup.path("out/table.md")) == read_file(setup.path("whole/table.md")));
  for (const auto& entry : fs::directory_iterator(setup.path("out/evaluations"))) {
    CHECK(entry.path().extension() == ".json");
  }
}

TEST_CASE("a model that changed is measured anew") {
  const Setup setup;
  REQUIRE(run(setup.words("out", {"steps=2"})).exit == 0);
  const Json before = setup.results("out");
  REQUIRE(run(setup.words("out")).exit == 0);  // the same runs, longer
  const Json after = setup.results("out");
  CHECK(before["entries"][0]["perplexity"] == after["entries"][0]["perplexity"]);
  CHECK(before["entries"][1]["perplexity"] != after["entries"][1]["perplexity"]);
  const RunResult shorter = run(setup.words("out", {"steps=2"}));
  CHECK(shorter.exit == 1);
  CHECK_THAT(shorter.err, Contains("has 6 steps, but the recipe 2"));
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
  SECTION("one run folder for both") { check_refused(setup, {"run=" + setup.path("runs/all")}, "have one run folder"); }
  SECTION("a recipe twice") {
    const RunResult twice = run({"compare", setup.path("lora.yaml"), setup.path("lora.yaml"), setup.path("lora.yaml"),
                                 "--out", setup.path("out")});
    CHECK(twice.exit == 1);
    CHECK_THAT(twice.err, Contains("is given twice"));
  }
  SECTION("no data") { check_refused(setup, {"data=" + setup.path("nothing.tokens")}, "nothing.tokens"); }
  SECTION("nothing held out") { check_refused(setup, {"held_out=0"}, "all of it is trained on"); }
  SECTION("a context longer than the text") {
    write_file(setup.path("eval.yaml"), "contexts: [16, 4096]\n");
    check_refused(setup, {"--eval", setup.path("eval.yaml")}, "too few for one window of context 4096");
  }
  SECTION("a stride above a context") {
    write_file(setup.path("eval.yaml"), "contexts: [16]\nstride: 17\n");
    check_refused(setup, {"--eval", setup.path("eval.yaml")}, "the stride of 17 is above the context of 16");
  }
  SECTION("a text to measure on that is not there") {
    write_file(setup.path("eval.yaml"), "data: nothing.tokens\n");
    check_refused(setup, {"--eval", setup.path("eval.yaml")}, "nothing.tokens");
  }
  SECTION("no such file of what to measure") { check_refused(setup, {"--eval", setup.path("eval.yaml")}, "eval.yaml"); }
  SECTION("no recipe") {
    const RunResult none = run({"compare", "steps=2", "--out", setup.path("out")});
    CHECK(none.exit == 1);
    CHECK_THAT(none.err, Contains("there is no recipe to compare"));
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
  CHECK_THAT(refused_plan("contexts: [16, many]\n"), Contains("a whole number from 2 on, but is \"many\""));
  CHECK_THAT(refused_plan("contexts: []\n"), Contains("one value or a list"));
  CHECK_THAT(refused_plan("protocol: slidng\n"),
             Contains("eval.yaml:1: there is no protocol \"slidng\"") && Contains("did you mean sliding?"));
  CHECK_THAT(refused_plan("stride: 0\n"), Contains("from 1 on"));
  CHECK_THAT(refused_plan("limit: -3\n"), Contains("from 1 on"));
  CHECK_THAT(refused_plan("limit: 3\nlimit: 4\n"), Contains("twice"));
  CHECK_THAT(refused_plan("passkey: 3\n"), Contains("passkey must be a map"));
  CHECK_THAT(refused_plan("passkey: {depth: 3}\n"), Contains("did you mean depths?"));
  CHECK_THAT(refused_plan("- 16\n"), Contains("must be a map"));
  CHECK_THAT(refused_plan("contexts: [16\n"), Contains("not YAML"));
}

TEST_CASE("the paper's numbers stand beside Llama-2 7B at 8192 tokens, and nothing else") {
  Comparison comparison;
  ModelConfig& config = comparison.base_config;
  config.layers = config.kv_heads = config.heads = 32;
  config.hidden_size = config.context = 4096;
  config.intermediate_size = 11008;
  comparison.trained_context = 8192;
  REQUIRE(paper_rows(comparison).size() == 8);
  CHECK(paper_rows(comparison)[3].method == "tape");
  CHECK(paper_rows(comparison)[3].perplexity[3] == 2.708);
  comparison.contexts = {8192};
  comparison.texts = {{"pg19", "pg19.tokens", 0, 1234, false}};
  for (const char* method : {"none", "tape", "full"}) {
    comparison.entries.push_back({method, method, 8192, "", {{{8192, 4096, 1, 1, 0, 7.5, {}}}}, {}, {}, {}, {}, {}});
  }
  const std::string page = report_page(comparison);
  CHECK_THAT(page, Contains("<th scope=\"col\">paper: Proof-pile, 8192</th><th scope=\"col\">paper: PG19, 8192</th>"));
  CHECK_THAT(page, Contains("<td class=\"paper\">2.708</td><td class=\"paper\">7.063</td>"));
  CHECK_THAT(page, Contains("<tr><td>PG19</td><td>theta-scaling</td><td>9.257</td>"));
  CHECK_THAT(markdown(comparison),
             Contains("|  | 8192 | paper: Proof-pile, 8192 | paper: PG19, 8192 |\n|---|---:|---:|---:|"));
  CHECK_THAT(markdown(comparison),
             Contains("| tape | **7.500** | 2.708 | 7.063 |") && Contains("| full | **7.500** | – | – |"));
  comparison.trained_context = 16384;
  CHECK_THAT(report_page(comparison), !Contains("paper: PG19"));
  CHECK(paper_rows(comparison).empty());
  comparison.trained_context = 8192;
  config.layers = 40;
  CHECK(paper_rows(comparison).empty());
}

TEST_CASE("the page has a heat map of retrieval where it was measured, and says what the numbers say") {
  Comparison comparison;
  comparison.base = "models/tiny/";
  comparison.base_config.context = 16;
  comparison.trained_context = 64;
  comparison.contexts = {16, 64};
  comparison.texts = {{"text", "text.tokens", 0, 1234, false}};
  for (const char* name : {"base model", "<lora>"}) {
    Entry entry;
    entry.name = name;
    const bool base = comparison.entries.empty();
    entry.method = base ? "none" : "lora";
    entry.context = base ? 16 : 64;
    entry.perplexity = {{{16, 8, 1, 1, 0, base ? 4.0 : 5.0, {}}, {64, 32, 1, 1, 0, base ? 400.0 : 4.5, {}}}};
    if (!base) entry.losses = {{1, 2.0}, {2, 1.5}};
    comparison.entries.push_back(std::move(entry));
  }
  CHECK_THAT(report_page(comparison), !Contains("Passkey"));
  CHECK(chart_files(comparison).size() == 4);
  comparison.entries[1].passkey = {{16, 0, 4, 4, 1.0}, {16, 1, 4, 1, 0.25}, {64, 0, 4, 0, 0.0}};
  const std::string page = report_page(comparison);
  CHECK_THAT(page, Contains("<h1>tiny to 64 tokens: 1 recipe compared</h1>"));
  CHECK_THAT(page, Contains("<b>&lt;lora&gt;</b> has the lowest perplexity of what was trained, 4.500; the base model, "
                            "made for 16, has 400.0."));
  CHECK_THAT(page, Contains("<td><b>4.000</b>") && Contains("<td>400.0*</td>"));
  CHECK_THAT(page, Contains("Passkey retrieval") && Contains("depth 100%, context (tokens) 16: 25%"));
  CHECK(chart_files(comparison).size() == 6);
  CHECK_THAT(markdown(comparison), Contains("| base model | **4.000** | 400.0\\* |"));
}

TEST_CASE("charts: names are escaped, numbers are there as a table, and empty ones are no trouble") {
  LineChart chart;
  chart.name = "c";
  chart.title = "a < b";
  chart.x_label = "context, tokens";
  chart.y_label = "perplexity";
  chart.log_x = chart.log_y = true;
  chart.series = {{"R&D", 1, {{512, 4}, {1024, 400}}, {}}, {"flat", 2, {{512, 4}}, {}}};
  for (const int width : {wide_chart, narrow_chart}) {
    const std::string drawn = svg(chart, width);
    CHECK_THAT(drawn, Contains("R&amp;D") && Contains("a &lt; b") && !Contains("nan") && !Contains("inf"));
    CHECK_THAT(drawn, Contains("<title>context, tokens 512&#10;R&amp;D 4&#10;flat 4</title>"));
  }
  CHECK(csv(chart) == "series,\"context, tokens\",perplexity\nR&D,512,4\nR&D,1024,400\nflat,512,4\n");
  CHECK(svg_file(svg(chart)).starts_with("<svg xmlns="));
  CHECK_THAT(svg_file(svg(chart)), Contains("<style>"));
  chart.series.clear();
  CHECK_THAT(svg(chart), !Contains("nan") && !Contains("inf"));

  HeatMap map;
  map.columns = {"1", "2"};
  map.rows = {"0%"};
  map.percent = true;
  map.panels = {{"tape", {{1.0, NAN}}}};
  CHECK_THAT(svg(map), Contains("#fee838") && !Contains("nan"));
  CHECK(csv(map) == "panel,,,\ntape,0%,1,1\n");
}
