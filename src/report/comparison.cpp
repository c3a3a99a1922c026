#include "report/comparison.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "core/digits.h"
#include "core/markdown.h"
#include "recipe/recipe.h"
#include "recipe/yaml.h"
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

Json number_or_text(const std::string& text) {
  std::int64_t whole = 0;
  double number = 0;
  const char *begin = text.data(), *end = begin + text.size();
  if (const auto [rest, error] = std::from_chars(begin, end, whole); error == std::errc() && rest == end) return whole;
  if (const auto [rest, error] = std::from_chars(begin, end, number); error == std::errc() && rest == end)
    return number;
  return text;
}

// A setting's value in the type that its key has.
Json setting_json(const std::string& key, const std::string& value) {
  if (value == "nothing" || value == "null") return {};
  const auto known =
      std::find_if(recipe_keys().begin(), recipe_keys().end(), [&](const RecipeKey& each) { return each.name == key; });
  const std::string type = known == recipe_keys().end() ? "" : known->type;
  if (type == "true or false") return value == "true";
  const YamlNode node = parse_yaml(value, key);
  if (node.kind == YamlNode::Kind::list) {
    Json list = Json::array();
    for (const YamlNode& item : node.items) list.push_back(number_or_text(item.text));
    return list;
  }
  if (node.kind != YamlNode::Kind::scalar) return value;
  return type == "number" || type == "whole number" ? number_or_text(node.text) : Json(node.text);
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

std::size_t headline_context(const Comparison& c) {
  const auto trained = std::find(c.contexts.begin(), c.contexts.end(), c.trained_context);
  return trained == c.contexts.end() ? c.contexts.size() - 1 : static_cast<std::size_t>(trained - c.contexts.begin());
}

const Entry& best_entry(const Comparison& c, std::size_t context) {
  return *std::min_element(c.entries.begin() + 1, c.entries.end(), [&](const Entry& a, const Entry& b) {
    return a.perplexity[0][context].perplexity < b.perplexity[0][context].perplexity;
  });
}

std::string machine_text(const std::string& machine, int threads, int ranks) {
  return fmt::format("{}, {}{}", machine, counted(threads, "thread"),
                     ranks > 1 ? fmt::format(" on each of {} ranks", ranks) : "");
}

std::string protocol_sentence(const Comparison& c) {
  std::string every = "every half context";
  if (!c.entries.empty() && !c.entries[0].perplexity.empty()) {
    const std::vector<ContextPerplexity>& rows = c.entries[0].perplexity[0];
    const bool same = std::all_of(rows.begin(), rows.end(),
                                  [&](const ContextPerplexity& row) { return row.stride == rows[0].stride; });
    const bool half = std::all_of(rows.begin(), rows.end(),
                                  [](const ContextPerplexity& row) { return row.stride == (row.context + 1) / 2; });
    if (!rows.empty() && !half) {
      every = same ? fmt::format("every {} tokens", rows[0].stride)
                   : fmt::format("every {} tokens (at shorter contexts every context)", rows.back().stride);
    }
  }
  switch (c.protocol) {
    case Protocol::sliding:
      return fmt::format(
          "Sliding window: a window of the given context starts {}, and each token is scored once, in "
          "the first window that contains it.",
          every);
    case Protocol::longlora:
      return fmt::format(
          "As in the LongLoRA and TAPE papers: a window of the given context starts {}, and all tokens "
          "of every window are scored.",
          every);
    case Protocol::blocks:
      break;
  }
  return "Non-overlapping windows of the given context, as in training; the remainder at the end is not scored.";
}

std::string position_differences(const Comparison& c) {
  std::vector<std::string> groups;
  groups.reserve(c.positions.size());
  for (const PositionGroup& group : c.positions) {
    groups.push_back(fmt::format("{}: {}", fmt::join(group.recipes, ", "), group.settings));
  }
  return fmt::format("{}", fmt::join(groups, "; "));
}

// All that depends on when and where it ran is in `cost`: the rest is the same however often a comparison was resumed.
Json results_json(const Comparison& c) {
  Json texts = Json::array(), entries = Json::array(), runs = Json::object(), differences = Json::object();
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
    runs[entry.name] = {{"trained_parameters", entry.cost.trained_parameters},
                        {"step_seconds", entry.cost.step_seconds},
                        {"tokens_per_s", entry.cost.tokens_per_s},
                        {"peak_mb", entry.cost.peak_mb},
                        {"machines", entry.cost.machines}};
  }
  for (const SettingRow& row : c.differences) {
    Json& values = differences[row.key] = Json::array();
    for (const std::string& value : row.values) values.push_back(setting_json(row.key, value));
  }
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
          {"positions_differ", c.positions.size() > 1},
          {"pictured_tokens", c.pictured},
          {"cost",
           {{"report_made_on", {{"date", c.date}, {"machine", c.machine}, {"threads", c.threads}, {"ranks", c.ranks}}},
            {"runs", runs}}}};
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
                        grouped(c.texts[t].tokens), markdown_text(c.texts[t].name), protocol_name(c.protocol));
    const std::vector<std::string> headings = paper_headings(c);
    for (const std::int64_t context : c.contexts) text += fmt::format(" {} |", context);
    for (const std::string& heading : headings) text += fmt::format(" {} |", heading);
    text += "\n|---|";
    for (std::size_t i = 0; i < c.contexts.size() + headings.size(); ++i) text += "---:|";
    for (const Entry& entry : c.entries) {
      text += fmt::format("\n| {} |", markdown_text(entry.name));
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
  if (marked) text += "\n\\* longer than the model's context\n";
  text += fmt::format("\n{}\n", protocol_sentence(c));
  if (!c.equal_positions.empty()) {
    text += fmt::format(
        "\nThe recipes scale positions differently ({}), so these numbers compare methods and scalings at once. To "
        "compare the methods with equal positions:\n\n{}",
        markdown_text(position_differences(c)), markdown_block("sh", c.equal_positions));
  }
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
