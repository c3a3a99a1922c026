// The report: its page, its tables, and the charts' arithmetic.
#include <map>

#include "catch.h"
#include "compare/comparison.h"
#include "report/chart.h"
#include "report/page.h"
#include "report/paper.h"
#include "report/tables.h"

namespace report_test {

using namespace tapetune;

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
  CHECK_THAT(page,
             Contains("<b>&lt;lora&gt;</b> has the lowest perplexity of the trained models, 4.500; the base model "
                      "(context 16) has 400.0."));
  CHECK_THAT(page, !Contains("than every trained model"));  // at 64 tokens the base model is worse
  CHECK_THAT(page, Contains("<td><b>4.000</b>") && Contains("<td>400.0*</td>"));
  comparison.entries[0].perplexity[0][1].perplexity = 4.4;
  CHECK_THAT(report_page(comparison),
             Contains("The base model has a lower perplexity than every trained model at every context."));
  comparison.entries[0].perplexity[0][1].perplexity = 400.0;
  CHECK_THAT(page, Contains("4 trials per cell"));
  CHECK_THAT(page, Contains("Passkey retrieval") && Contains("depth (%) 100, context (tokens) 16: 25%"));
  CHECK(chart_files(comparison).size() == 6);
  CHECK_THAT(markdown(comparison), Contains("| base model | **4.000** | 400.0\\* |"));
}

TEST_CASE("chart files: columns are named for what they hold, each once") {
  Comparison comparison;
  comparison.base_config.context = 16;
  comparison.trained_context = 64;
  comparison.contexts = {16, 64};
  comparison.texts = {{"text", "text.tokens", 0, 1234, false}};
  comparison.pictured = {0, 1};
  for (const char* method : {"none", "tape"}) {
    Entry entry;
    entry.name = entry.method = method;
    const bool base = comparison.entries.empty();
    entry.positions_change = !base;
    entry.perplexity = {{{16, 8, 1, 1, 0, base ? 4.0 : 5.0, {}}, {64, 32, 1, 1, 0, base ? 400.0 : 4.5, {}}}};
    for (int step = 1; !base && step <= 600; ++step) entry.losses.push_back({step, step % 2 == 0 ? 1.0 : 3.0});
    entry.layers = {{2.5, {{1, 0}, {0.5, 1}}}, {3.5, {{1, 0}, {0.25, 1}}}};
    if (!base) entry.passkey = {{16, 0.5, 4, 1, 0.25}};
    comparison.entries.push_back(std::move(entry));
  }
  std::map<std::string, std::string> files;
  for (auto& [name, text] : chart_files(comparison)) files.emplace(name, text);
  const auto begins = [&](const std::string& name, std::string_view with) {
    INFO(name << ": " << files[name].substr(0, 100));
    CHECK(files[name].starts_with(with));
  };
  begins("perplexity.csv", "series,context,perplexity\nnone,16,4\n");
  CHECK_THAT(files["perplexity.svg"], Contains("perplexity (log scale)"));
  begins("attention-distance.csv", "series,layer,attention_distance\nnone,1,2.5\n");
  begins("passkey.csv", "panel,depth_percent,context,accuracy\ntape,50,16,0.25\n");
  begins("positions-tape.csv", "panel,query_token,key_token,dot_product\n\"RoPE, all layers\",0,0,1\n");
  begins("position-changes-tape.csv", "panel,query_token,key_token,difference_from_rope\n");
  // Every step, with its own loss and the mean around it, though the chart draws fewer points.
  const std::string& loss = files["loss.csv"];
  begins("loss.csv", "series,step,loss,running_mean\ntape,1,3,2\n");
  CHECK(std::count(loss.begin(), loss.end(), '\n') == 601);
  CHECK_THAT(loss, Contains("\ntape,300,1,2.032"));
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
  chart.x_column = "context";
  chart.y_column = "perplexity";
  CHECK(csv(chart) == "series,context,perplexity\nR&D,512,4\nR&D,1024,400\nflat,512,4\n");
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
  map.x_column = "key, token";
  map.y_column = "query_token";
  map.value_column = "v";
  CHECK(csv(map) == "panel,query_token,\"key, token\",v\ntape,0%,1,1\n");
}

}  // namespace report_test
