#include "report/comparison.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/digits.h"
#include "report/chart.h"

namespace tapetune {

namespace {

constexpr PaperRow paper[] = {
    {"Proof-pile", "lora", {3.828, 3.369, 3.064, 2.867}},
    {"Proof-pile", "longlora", {3.918, 3.455, 3.153, 2.956}},
    {"Proof-pile", "theta-scaling", {3.864, 3.415, 3.121, 2.934}},
    {"Proof-pile", "tape", {3.641, 3.196, 2.901, 2.708}},
    {"PG19", "lora", {9.791, 9.098, 8.572, 8.199}},
    {"PG19", "longlora", {9.989, 9.376, 8.948, 8.645}},
    {"PG19", "theta-scaling", {9.257, 8.640, 8.241, 7.999}},
    {"PG19", "tape", {8.226, 7.642, 7.278, 7.063}},
};

Json json_of(const Entry& entry) {
  Json losses = Json::array(), held_out = Json::array(), passkey = Json::array(), layers = Json::array();
  for (const StepLoss& each : entry.losses) losses.push_back({each.step, each.loss});
  for (const StepLoss& each : entry.held_out_losses) held_out.push_back({each.step, each.loss});
  for (const RetrievalCell& cell : entry.passkey) {
    passkey.push_back({{"context", cell.context},
                       {"depth", cell.depth},
                       {"trials", cell.trials},
                       {"correct", cell.correct},
                       {"accuracy", cell.accuracy}});
  }
  for (const LayerPicture& layer : entry.layers) {
    layers.push_back({{"attention_distance", layer.distance}, {"position_dot_products", layer.position}});
  }
  Json json{{"name", entry.name}, {"method", entry.method}, {"context", entry.context}};
  json["perplexity"] = Json::array();
  for (const auto& text : entry.perplexity) {
    Json rows = Json::array();
    for (const ContextPerplexity& row : text) {
      rows.push_back({{"context", row.context},
                      {"stride", row.stride},
                      {"windows", row.windows},
                      {"tokens", row.tokens},
                      {"loss", row.loss},
                      {"perplexity", row.perplexity},
                      {"beyond_context", row.context > entry.context}});
    }
    json["perplexity"].push_back(rows);
  }
  json["losses"] = losses;
  json["held_out_losses"] = held_out;
  json["passkey"] = passkey;
  json["layers"] = layers;
  json["settings"] = entry.settings;
  return json;
}

constexpr std::string_view paper_texts[] = {"Proof-pile", "PG19"};

bool beyond(const Entry& entry, const ContextPerplexity& row) { return row.context > entry.context; }

}  // namespace

std::string shown_perplexity(double value) {
  return value < 10    ? fmt::format("{:.3f}", value)
         : value < 100 ? fmt::format("{:.2f}", value)
         : value < 1e4 ? fmt::format("{:.1f}", value)
                       : fmt::format("{:.3g}", value);
}

double best_perplexity(const Comparison& comparison, std::size_t text, std::size_t context) {
  double best = INFINITY;
  for (const Entry& entry : comparison.entries) best = std::min(best, entry.perplexity[text][context].perplexity);
  return best;
}

// Clocks stand apart: all else is the same however often a comparison was cut off.
Json results_json(const Comparison& c) {
  Json texts = Json::array(), entries = Json::array(), cost = Json::object(), differences = Json::object();
  for (const ComparedText& text : c.texts) {
    texts.push_back({{"name", text.name},
                     {"path", text.path},
                     {"first_token", text.first_token},
                     {"tokens", text.tokens},
                     {"held_out", text.held_out}});
  }
  for (const Entry& entry : c.entries) {
    entries.push_back(json_of(entry));
    if (entry.method == "none") continue;
    cost[entry.name] = {{"trained_parameters", entry.cost.trained_parameters},
                        {"step_seconds", entry.cost.step_seconds},
                        {"tokens_per_s", entry.cost.tokens_per_s},
                        {"peak_mb", entry.cost.peak_mb}};
  }
  for (const SettingRow& row : c.differences) differences[row.key] = row.values;
  return {{"tapetune", c.version},
          {"base", c.base},
          {"base_hash", c.base_hash},
          {"base_context", c.base_config.longest_context()},
          {"trained_context", c.trained_context},
          {"steps", c.steps},
          {"tokens_per_step", c.tokens_per_step},
          {"seed", c.seed},
          {"protocol", protocol_name(c.protocol)},
          {"contexts", c.contexts},
          {"texts", texts},
          {"entries", entries},
          {"differences", differences},
          {"pictured_tokens", c.pictured},
          {"cost", cost}};
}

std::string results_csv(const Comparison& c) {
  std::string text = "text,name,method,context,stride,windows,tokens,loss,perplexity,beyond_context\n";
  for (std::size_t t = 0; t < c.texts.size(); ++t) {
    for (const Entry& entry : c.entries) {
      for (const ContextPerplexity& row : entry.perplexity[t]) {
        text += fmt::format("{},{},{},{},{},{},{},{},{},{}\n", csv_field(c.texts[t].name), csv_field(entry.name),
                            entry.method, row.context, row.stride, row.windows, row.tokens, row.loss, row.perplexity,
                            beyond(entry, row));
      }
    }
  }
  return text;
}

std::string cost_csv(const Comparison& c) {
  std::string text = "name,method,trained_parameters,step_seconds,tokens_per_s,peak_mb\n";
  for (const Entry& entry : c.entries) {
    if (entry.method == "none") continue;
    text += fmt::format("{},{},{},{:.4f},{:.1f},{:.0f}\n", csv_field(entry.name), entry.method,
                        entry.cost.trained_parameters, entry.cost.step_seconds, entry.cost.tokens_per_s,
                        entry.cost.peak_mb);
  }
  return text;
}

std::string markdown(const Comparison& c) {
  std::string text;
  bool marked = false;
  for (std::size_t t = 0; t < c.texts.size(); ++t) {
    text += fmt::format("{}Perplexity on {} tokens of {}, protocol {}:\n\n|  |", t == 0 ? "" : "\n",
                        grouped(c.texts[t].tokens), c.texts[t].name, protocol_name(c.protocol));
    const std::vector<std::string> headings = paper_headings(c);
    for (const std::int64_t context : c.contexts) text += fmt::format(" {} |", context);
    for (const std::string& heading : headings) text += fmt::format(" {} |", heading);
    text += "\n|---|";
    for (std::size_t i = 0; i < c.contexts.size() + headings.size(); ++i) text += "---:|";
    for (const Entry& entry : c.entries) {
      text += fmt::format("\n| {} |", entry.name);
      for (std::size_t i = 0; i < c.contexts.size(); ++i) {
        const ContextPerplexity& row = entry.perplexity[t][i];
        const std::string mark = row.perplexity == best_perplexity(c, t, i) ? "**" : "";
        marked = marked || beyond(entry, row);
        text +=
            fmt::format(" {}{}{}{} |", mark, shown_perplexity(row.perplexity), mark, beyond(entry, row) ? "\\*" : "");
      }
      for (const std::string& cell : paper_cells(c, entry)) text += fmt::format(" {} |", cell);
    }
    text += "\n";
  }
  if (marked) text += "\n\\* beyond what the model is made for\n";
  return text;
}

std::vector<PaperRow> paper_rows(const Comparison& c) {
  const ModelConfig& m = c.base_config;
  const bool llama2_7b = m.architecture == Architecture::llama && m.layers == 32 && m.hidden_size == 4096 &&
                         m.intermediate_size == 11008 && m.kv_heads == 32 && m.context == 4096;
  if (!llama2_7b || c.trained_context != paper_contexts[3]) return {};
  return {std::begin(paper), std::end(paper)};
}

std::vector<std::string> paper_headings(const Comparison& c) {
  std::vector<std::string> headings;
  if (paper_rows(c).empty()) return headings;
  for (const std::string_view text : paper_texts) {
    headings.push_back(fmt::format("paper: {}, {}", text, paper_contexts[3]));
  }
  return headings;
}

std::vector<std::string> paper_cells(const Comparison& c, const Entry& entry) {
  std::vector<std::string> cells;
  const std::vector<PaperRow> rows = paper_rows(c);
  for (const std::string_view text : paper_texts) {
    const auto row = std::find_if(rows.begin(), rows.end(),
                                  [&](const PaperRow& r) { return r.text == text && r.method == entry.method; });
    if (!rows.empty()) cells.push_back(row == rows.end() ? "–" : shown_perplexity(row->perplexity[3]));
  }
  return cells;
}

}  // namespace tapetune
