#include "report/page.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "core/digits.h"
#include "report/figures.h"
#include "report/paper.h"
#include "report/tables.h"

namespace tapetune {

namespace {

constexpr std::string_view style = R"css(
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,'Segoe UI',Roboto,'Helvetica Neue',sans-serif}
main{max-width:820px;margin:0 auto;padding:28px 16px 56px}
h1{font-size:1.75rem;line-height:1.2;margin:0 0 .5rem;text-wrap:balance}
h2{font-size:1.2rem;margin:2.6rem 0 .4rem}
h3{font-size:1rem;margin:1.6rem 0 .3rem}
p{margin:.3rem 0 .8rem;max-width:68ch}
.lead{font-size:1.08rem}
.caution{border-left:3px solid var(--c2);padding:.1rem 0 .1rem .8rem;margin:.8rem 0}
.caution pre{white-space:pre-wrap;overflow-wrap:anywhere}
.note{color:var(--soft);font-size:.875rem}
.note.title{margin:.8rem 0 0}
.scroll{overflow-x:auto;margin:.6rem 0;
background:linear-gradient(270deg,var(--paper) 60%,transparent) 100% 0/40px 100% no-repeat local,
linear-gradient(270deg,var(--rule),transparent) 100% 0/14px 100% no-repeat scroll}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;min-width:100%}
th,td{padding:.36rem .6rem;text-align:right;border-bottom:1px solid var(--rule);white-space:nowrap}
th{font-weight:600}
thead th{color:var(--soft);font-size:.875rem;border-bottom-color:var(--soft);vertical-align:bottom}
th:first-child,td:first-child{text-align:left;padding-left:0;position:sticky;left:0;background:var(--paper)}
td.text{text-align:left;white-space:normal;min-width:7rem}
td b{color:var(--ink)}
tr.base td,tr.base th,td.paper{color:var(--soft)}
.key{display:inline-block;width:.7em;height:.7em;border-radius:2px;margin-right:.5em}
.bar{display:block;height:4px;border-radius:2px;background:var(--c1);margin-top:2px;margin-left:auto;opacity:.75}
figure{margin:.8rem 0 1.2rem}
figcaption{color:var(--soft);font-size:.875rem;margin-top:.2rem}
.chart{display:block;width:100%;height:auto}
.chart.narrow{display:none}
.panels{display:grid;grid-template-columns:repeat(auto-fill,minmax(220px,1fr));gap:12px}
.chart.scale{width:auto;max-width:100%;height:20px;margin-top:6px}
details{border-bottom:1px solid var(--rule);padding:.45rem 0}
summary{cursor:pointer;font-weight:600}
pre{overflow-x:auto;font:13px/1.45 ui-monospace,Menlo,Consolas,monospace;margin:.5rem 0}
code{font:.9em ui-monospace,Menlo,Consolas,monospace;overflow-wrap:anywhere}
#tip{position:fixed;z-index:2;pointer-events:none;background:var(--ink);color:var(--paper);padding:.35rem .55rem;
border-radius:6px;font-size:.8125rem;line-height:1.35;white-space:pre;font-variant-numeric:tabular-nums;display:none}
#tip b{display:block;font-weight:600}
.chart .cross{stroke:var(--soft);fill:none}
@media (max-width:640px){.chart.wide{display:none}.chart.narrow{display:block}main{padding-top:18px}h1{font-size:1.4rem}
th,td,thead th{padding:.34rem .16rem;font-size:.78rem}th,.settings td{white-space:normal}.key{margin-right:.3em}
.panels{grid-template-columns:1fr 1fr;gap:8px}
.chart.panel text{font-size:16.8px}}
@media print{body{font-size:11pt}main{max-width:none;padding:0}h2{break-after:avoid}figure,tr{break-inside:avoid}
.scroll{overflow:visible}.chart.wide{display:block}.chart.narrow{display:none}pre{white-space:pre-wrap}#tip{display:none!important}}
)css";

// Shows values at the pointer; without JavaScript the browser shows the charts' own titles.
constexpr std::string_view script = R"js(
const tip = document.getElementById('tip');
const cross = document.createElementNS('http://www.w3.org/2000/svg', 'path');
cross.setAttribute('class', 'cross');
for (const mark of document.querySelectorAll('.band,.cell')) {
  const title = mark.querySelector('title');
  const words = title.textContent;
  mark.setAttribute('aria-label', words);
  title.remove();
  mark.addEventListener('pointermove', event => {
    const lines = words.split('\n');
    const first = document.createElement('b');
    first.textContent = lines[0];
    tip.replaceChildren(first, lines.slice(1).join('\n'));
    tip.style.display = 'block';
    const wide = tip.offsetWidth + 14;
    const left = event.clientX + wide > innerWidth ? Math.max(4, event.clientX - wide) : event.clientX + 14;
    tip.style.left = left + 'px';
    tip.style.top = Math.max(4, Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 4)) + 'px';
    if (mark.dataset.x) {
      const box = mark.getBBox();
      cross.setAttribute('d', `M${mark.dataset.x} ${box.y}v${box.height}`);
      mark.parentNode.insertBefore(cross, mark.parentNode.querySelector('.band'));
    }
  });
  mark.addEventListener('pointerleave', () => { tip.style.display = 'none'; cross.remove(); });
}
addEventListener('beforeprint', () => document.querySelectorAll('details').forEach(one => { one.open = true; }));
)js";

std::string key(const Comparison& c, const Entry& entry) {
  return fmt::format("<span class=\"key\" style=\"background:var(--c{})\"></span>&#8288;{}", colour_of(c, entry) % 8,
                     escaped(entry.name));
}

std::string figure(const LineChart& chart, std::string_view caption) {
  return fmt::format("<figure id=\"{}\">\n{}{}<figcaption>{}</figcaption></figure>\n", escaped(chart.name), svg(chart),
                     svg(chart, narrow_chart), caption);
}

std::string figure(const HeatMap& map, std::string_view caption) {
  std::string panels;
  for (std::size_t i = 0; i < map.panels.size(); ++i) panels += panel_svg(map, i);
  return fmt::format("<figure id=\"{}\"><div class=\"panels\">\n{}</div>\n{}<figcaption>{}</figcaption></figure>\n",
                     escaped(map.name), panels, scale_svg(map), caption);
}

std::string base_name(const Comparison& c) {
  std::string_view path = c.base;
  while (path.size() > 1 && path.ends_with('/')) path.remove_suffix(1);
  return std::string(path.substr(path.rfind('/') + 1));
}

// The findings in words, whoever wins.
std::string findings(const Comparison& c) {
  const std::size_t at = headline_context(c), last = c.contexts.size() - 1;
  const Entry& best = best_entry(c, at);
  const auto value = [&](const Entry& entry, std::size_t context) {
    return shown_perplexity(entry.perplexity[0][context].perplexity);
  };
  std::string text = fmt::format(
      "At {} tokens{}, <b>{}</b> has the lowest perplexity of the trained models, {}; the base model (context {}) has "
      "{}.",
      c.contexts[at], c.contexts[at] == c.trained_context ? ", the training context" : "", escaped(best.name),
      value(best, at), c.base_config.longest_context(), value(c.entries[0], at));
  if (last != at) {
    const Entry& furthest = best_entry(c, last);
    text +=
        fmt::format(" At {} tokens{}, <b>{}</b> has the lowest of them, {}; the base model has {}.", c.contexts[last],
                    c.contexts[last] > c.trained_context ? ", longer than the training context" : "",
                    escaped(furthest.name), value(furthest, last), value(c.entries[0], last));
  }
  bool base_is_best = true;
  for (std::size_t i = 0; i < c.contexts.size(); ++i) {
    base_is_best &= c.entries[0].perplexity[0][i].perplexity < best_entry(c, i).perplexity[0][i].perplexity;
  }
  if (base_is_best) {
    text += " <b>The base model has a lower perplexity than every trained model at every context.</b>";
  }
  return text;
}

// Beside the headline, where it does not compare methods alone.
std::string position_caution(const Comparison& c) {
  if (c.equal_positions.empty()) return "";
  return fmt::format(
      "<div class=\"caution\"><p><b>Positions are scaled differently</b> ({}), so the numbers compare methods and "
      "scalings at once. To compare the methods with equal positions:</p>\n<pre>{}</pre></div>\n",
      escaped(position_differences(c)), escaped(c.equal_positions));
}

std::string perplexity_table(const Comparison& c, std::size_t text) {
  std::string html = fmt::format(
      "<p class=\"note title\">Perplexity by context, on {} tokens of {}</p>\n<div class=\"scroll\"><table>\n"
      "<thead><tr><th></th>",
      grouped(c.texts[text].tokens), escaped(c.texts[text].name));
  // The figure space is as wide as the mark of the cells below.
  for (const std::int64_t context : c.contexts) html += fmt::format("<th scope=\"col\">{}&#8199;</th>", context);
  for (const std::string& heading : paper_headings(c)) html += fmt::format("<th scope=\"col\">{}</th>", heading);
  html += "</tr></thead>\n<tbody>\n";
  bool beyond = false;
  for (const Entry& entry : c.entries) {
    html +=
        fmt::format("<tr{}><th scope=\"row\">{}</th>", entry.method == "none" ? " class=\"base\"" : "", key(c, entry));
    for (std::size_t i = 0; i < c.contexts.size(); ++i) {
      const ContextPerplexity& row = entry.perplexity[text][i];
      const bool best = row.perplexity == best_perplexity(c, text, i), marked = row.context > entry.context;
      beyond = beyond || marked;
      html += fmt::format("<td>{}{}{}{}</td>", best ? "<b>" : "", shown_perplexity(row.perplexity), best ? "</b>" : "",
                          marked ? "*" : "&#8199;");
    }
    for (const std::string& cell : paper_cells(c, entry)) html += fmt::format("<td class=\"paper\">{}</td>", cell);
    html += "</tr>\n";
  }
  html += "</tbody></table></div>\n";
  html += fmt::format("<p class=\"note\">{} The lowest value of a column is bold.{}</p>\n",
                      escaped(protocol_sentence(c)), beyond ? " * longer than the model&#39;s context." : "");
  return html;
}

std::string paper_table(const Comparison& c) {
  const std::vector<PaperRow> rows = paper_rows(c);
  if (rows.empty()) return "";
  std::string html =
      "<h3>The paper's numbers</h3>\n<p>Llama-2 7B trained for 8192 tokens, as printed in arXiv 2501.00712. They were "
      "measured with the protocol <code>longlora</code>, on other texts than these unless you gave the same.</p>\n"
      "<div class=\"scroll\"><table><thead><tr><th>text</th><th>method</th>";
  for (const std::int64_t context : paper_contexts) html += fmt::format("<th scope=\"col\">{}</th>", context);
  html += "</tr></thead><tbody>\n";
  for (const PaperRow& row : rows) {
    html += fmt::format("<tr><td>{}</td><td>{}</td>", row.text, row.method);
    for (const double value : row.perplexity) html += fmt::format("<td>{:.3f}</td>", value);
    html += "</tr>\n";
  }
  return html + "</tbody></table></div>\n";
}

// Where the runs trained, which may be elsewhere than where the report is made.
std::string training_machines(const Comparison& c) {
  std::vector<std::pair<std::string, std::vector<std::string>>> machines;  // with the runs on each
  for (const Entry& entry : c.entries) {
    if (entry.method == "none") continue;
    const std::string machine =
        entry.cost.machines.empty() ? "not recorded" : fmt::format("{}", fmt::join(entry.cost.machines, ", then "));
    const auto same = std::find_if(machines.begin(), machines.end(), [&](const auto& m) { return m.first == machine; });
    if (same == machines.end()) {
      machines.push_back({machine, {entry.name}});
    } else {
      same->second.push_back(entry.name);
    }
  }
  if (machines.size() == 1) return machines.front().first;
  std::vector<std::string> texts;
  texts.reserve(machines.size());
  for (const auto& [machine, runs] : machines) texts.push_back(fmt::format("{}: {}", fmt::join(runs, ", "), machine));
  return fmt::format("{}", fmt::join(texts, "; "));
}

std::string cost_table(const Comparison& c) {
  Cost most;
  for (const Entry& entry : c.entries) {
    most.trained_parameters = std::max(most.trained_parameters, entry.cost.trained_parameters);
    most.step_seconds = std::max(most.step_seconds, entry.cost.step_seconds);
    most.tokens_per_s = std::max(most.tokens_per_s, entry.cost.tokens_per_s);
    most.peak_mb = std::max(most.peak_mb, entry.cost.peak_mb);
  }
  const auto cell = [](const std::string& words, double value, double largest) {
    return fmt::format("<td>{}<span class=\"bar\" style=\"width:{:.0f}%\"></span></td>", words,
                       largest > 0 ? 100 * value / largest : 0);
  };
  std::string html =
      "<div class=\"scroll\"><table><thead><tr><th></th><th>trainable parameters</th><th>time per step</th>"
      "<th>tokens/s</th><th>peak memory</th></tr></thead><tbody>\n";
  for (const Entry& entry : c.entries) {
    if (entry.method == "none") continue;
    const Cost& cost = entry.cost;
    html += fmt::format("<tr><th scope=\"row\">{}</th>", key(c, entry));
    html += cell(grouped(cost.trained_parameters), static_cast<double>(cost.trained_parameters),
                 static_cast<double>(most.trained_parameters));
    html += cell(fmt::format("{:.3g} s", cost.step_seconds), cost.step_seconds, most.step_seconds);
    html += cell(grouped(std::llround(cost.tokens_per_s)), cost.tokens_per_s, most.tokens_per_s);
    html += cell(fmt::format("{} MB", grouped(std::llround(cost.peak_mb))), cost.peak_mb, most.peak_mb) + "</tr>\n";
  }
  return html +
         fmt::format(
             "</tbody></table></div>\n<p class=\"note\">Training: the median time of a step of {} tokens, and the "
             "peak resident memory of the process. Trained on: {}.</p>\n",
             grouped(c.tokens_per_step), escaped(training_machines(c)));
}

bool has_positions(const Entry& entry) { return entry.positions_change && entry.layers.size() > 1; }

bool has_passkey(const Comparison& c) {
  return std::any_of(c.entries.begin(), c.entries.end(), [](const Entry& entry) { return !entry.passkey.empty(); });
}

bool has_layers(const Comparison& c) {
  return std::any_of(c.entries.begin(), c.entries.end(), [](const Entry& entry) { return !entry.layers.empty(); });
}

std::int64_t passkey_trials(const Comparison& c) {
  for (const Entry& entry : c.entries) {
    if (!entry.passkey.empty()) return entry.passkey.front().trials;
  }
  return 0;
}

std::string settings(const Comparison& c) {
  std::string html =
      "<p>All recipes trained on the same windows in the same order, and all models were evaluated on the same "
      "tokens.</p>\n";
  if (!c.differences.empty()) {
    html +=
        "<p class=\"note title\">Settings in which the recipes differ</p>\n"
        "<div class=\"scroll settings\"><table><thead><tr><th>key</th>";
    for (const Entry& entry : c.entries) {
      if (entry.method != "none") html += fmt::format("<th>{}</th>", escaped(entry.name));
    }
    html += "</tr></thead><tbody>\n";
    for (const SettingRow& row : c.differences) {
      html += fmt::format("<tr><td>{}</td>", escaped(row.key));
      for (const std::string& value : row.values)
        html += fmt::format("<td>{}</td>", value == "nothing" || value == "null" ? "–" : escaped(value));
      html += "</tr>\n";
    }
    html += "</tbody></table></div>\n";
  }
  for (const Entry& entry : c.entries) {
    if (entry.method == "none") continue;
    html += fmt::format("<details><summary>{}</summary><pre>{}</pre></details>\n", escaped(entry.name),
                        escaped(entry.settings));
  }
  html += "<details><summary>Evaluation</summary><div class=\"scroll\"><table><tbody>\n";
  const auto row = [&](std::string_view name, const std::string& value) {
    html += fmt::format("<tr><td>{}</td><td class=\"text\"><code>{}</code></td></tr>\n", name, escaped(value));
  };
  row("base model", c.base);
  if (!c.base_hash.empty()) row("hash of its weights", c.base_hash);
  for (const ComparedText& text : c.texts) {
    row("text", fmt::format("{}, {} tokens from token {}", text.path, grouped(text.tokens), text.first_token));
  }
  row("protocol", std::string(protocol_name(c.protocol)));
  row("training",
      fmt::format("{} of {} tokens, seed {}", counted(c.steps, "step"), grouped(c.tokens_per_step), c.seed));
  if (has_passkey(c)) {
    row("passkey", fmt::format("{} for each context and depth", counted(passkey_trials(c), "trial")));
  }
  row("trained on", training_machines(c));
  row("report made on", machine_text(c.machine, c.threads, c.ranks));
  row("date", c.date);
  row("version", "tapetune " + c.version);
  return html + "</tbody></table></div></details>\n";
}

std::string inside(const Comparison& c) {
  std::string html = "<h2>Inside the models</h2>\n";
  for (const Entry& entry : c.entries) {
    if (!has_positions(entry)) continue;
    html +=
        figure(position_map(c, entry),
               fmt::format("Dot products of the position states of pairs of tokens, averaged over channels, for the "
                           "first {} tokens of the text. RoPE's depend only on the distance and are the same in "
                           "every layer; {} updates them from layer to layer.",
                           c.pictured.empty() ? 0 : c.pictured.back() + 1, escaped(entry.name)));
    html += figure(position_change_map(c, entry), "The same pairs: each layer's difference from RoPE.");
  }
  return html + figure(distance_chart(c),
                       "How far back each layer attends: the distance to the attended tokens, weighted by the "
                       "attention probabilities, averaged over heads and tokens.");
}

}  // namespace

std::string report_page(const Comparison& c) {
  const std::string title = fmt::format("{} to {} tokens", base_name(c), c.trained_context);
  std::string html = fmt::format(
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" "
      "content=\"width=device-width,initial-scale=1\"><title>{0}: comparison</title>\n<link rel=\"icon\" "
      "href=\"data:,\">\n<style>{1}{2}</style></head>\n<body><main>\n<h1>{0}: {3} {4} compared</h1>\n<p "
      "class=\"lead\">{5}</p>\n{6}<p class=\"note\">{7}, tapetune {8}</p>\n",
      escaped(title), chart_style(), style, c.entries.size() - 1, c.entries.size() == 2 ? "recipe" : "recipes",
      findings(c), position_caution(c), c.date.substr(0, c.date.find('T')), escaped(c.version));
  html += "<h2>Perplexity</h2>\n";
  for (std::size_t t = 0; t < c.texts.size(); ++t) {
    html += perplexity_table(c, t);
    html += figure(perplexity_chart(c, t), "Lower is better.");
  }
  html += paper_table(c);
  html += "<h2>Training</h2>\n" + figure(loss_chart(c), "Loss of each step (faint) and its running mean.");
  if (has_passkey(c)) {
    html +=
        "<h2>Passkey retrieval</h2>\n" +
        figure(passkey_map(c),
               fmt::format("Accuracy of retrieving a number hidden in repeated filler sentences, by the length of the "
                           "prompt and the depth of the number in it (0%: at the beginning); {} {} per cell.",
                           passkey_trials(c), passkey_trials(c) == 1 ? "trial" : "trials"));
  }
  if (has_layers(c)) html += inside(c);
  html += "<h2>Cost</h2>\n" + cost_table(c);
  html += "<h2>Settings</h2>\n" + settings(c);
  html += "</main><div id=\"tip\" role=\"status\"></div>\n<script>" + std::string(script) + "</script></body></html>\n";
  return html;
}

std::vector<std::pair<std::string, std::string>> chart_files(const Comparison& c) {
  std::vector<std::pair<std::string, std::string>> files;
  const auto add = [&](const auto& chart) {
    files.emplace_back(chart.name + ".svg", svg_file(svg(chart)));
    files.emplace_back(chart.name + ".csv", csv(chart));
  };
  for (std::size_t t = 0; t < c.texts.size(); ++t) add(perplexity_chart(c, t));
  add(loss_chart(c));
  if (has_passkey(c)) add(passkey_map(c));
  if (has_layers(c)) add(distance_chart(c));
  for (const Entry& entry : c.entries) {
    if (!has_positions(entry)) continue;
    add(position_map(c, entry));
    add(position_change_map(c, entry));
  }
  return files;
}

}  // namespace tapetune
