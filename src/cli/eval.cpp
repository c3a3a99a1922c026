#include <stdlib.h>
#include <CLI/CLI.hpp>

#include <chrono>

#include "cli/subject.h"
#include "cli/together.h"
#include "cli/verbs.h"
#include "core/error.h"
#include "core/json.h"
#include "core/log.h"
#include "data/pack.h"
#include "eval/perplexity.h"
#include "train/base.h"

namespace tapetune::cli {

namespace {

namespace fs = std::filesystem;

bool is_text(fs::path path) {
  if (path.extension() == ".gz" || path.extension() == ".zst") path.replace_extension();
  return path.extension() == ".txt" || path.extension() == ".jsonl";
}

// Through a token file that vanishes with the last use of it.
TokenFile tokenised(const std::string& path, const fs::path& tokenizer_folder, int threads) {
  if (tokenizer_folder.empty()) {
    fail("eval", "{}: the model comes without a tokenizer, so that text needs to be packed first (tapetune data pack).",
         path);
  }
  const Tokenizer tokenizer = Tokenizer::open(tokenizer_folder);
  const TokenIds framed = tokenizer.encode("a");
  std::string folder = (fs::temp_directory_path() / "tapetune-eval-XXXXXX").string();
  if (::mkdtemp(folder.data()) == nullptr) {
    fail("eval", "{}: no folder can be made there for the tokens of {}; set TMPDIR to another.", folder, path);
  }
  const std::unique_ptr<const std::string, void (*)(const std::string*)> gone(&folder, [](const std::string* name) {
    std::error_code ignored;
    fs::remove_all(*name, ignored);
  });
  PackOptions pack_options;
  pack_options.inputs = {path};
  pack_options.model = tokenizer_folder;
  pack_options.out = fs::path(folder) / "tokens";
  pack_options.eos = tokenizer.eos() && framed.back() == *tokenizer.eos() ? Frame::automatic : Frame::never;
  pack_options.threads = threads;
  pack(pack_options);
  return TokenFile::open(pack_options.out);
}

struct Perplexity {
  ModelOptions model;
  std::string data, protocol = "sliding", split = "whole", resume;
  std::vector<std::int64_t> contexts;
  std::int64_t stride = -1, limit = 0, buckets = 0;
  double held_out = -1;  // negative: the run's share, else a tenth
  bool json = false;
  TogetherOptions together;
};

TokenRange open_range(const Perplexity& options, const Subject& subject) {
  const ModelConfig& config = subject.adapted.model.config();
  const TokenFile file = is_text(options.data) ? tokenised(options.data, subject.tokenizer, options.model.threads)
                                               : open_tokens(options.data, known_vocabulary(subject.tokenizer), config);
  TokenRange range{file, 0, file.size()};
  if (options.split == "held-out") {
    const double recipes = subject.recipe ? subject.recipe->held_out : 0;
    const double share = options.held_out >= 0 ? options.held_out : recipes > 0 ? recipes : 0.1;
    range.begin = held_out_begin(file, share, subject.recipe ? subject.recipe->context : 1);
    range.size -= range.begin;
  }
  if (options.limit > 0) range.size = std::min(range.size, options.limit);
  return range;
}

std::string about(Protocol protocol) {
  switch (protocol) {
    case Protocol::longlora:
      return "every window counted in full, as in the papers' tables";
    case Protocol::sliding:
      return "each token counted once, after context - stride others or more";
    default:
      return "windows side by side";
  }
}

void print_table(const std::vector<ContextPerplexity>& results, Protocol protocol, std::int64_t model_context) {
  fmt::print("protocol {}: {}\n\n", protocol_name(protocol), about(protocol));
  fmt::print("{:>9}  {:>7}  {:>8}  {:>11}  {:>8}  {:>10}\n", "context", "stride", "windows", "tokens", "loss",
             "perplexity");
  bool beyond = false;
  for (const ContextPerplexity& row : results) {
    const bool marked = row.context > model_context;
    beyond = beyond || marked;
    fmt::print("{:>8}{}  {:>7}  {:>8}  {:>11}  {:>8.4f}  {:>10.5g}\n", row.context, marked ? "*" : " ", row.stride,
               row.windows, row.tokens, row.loss, row.perplexity);
  }
  if (beyond) fmt::print("* beyond the model's context of {}\n", model_context);
}

void print_buckets(const std::vector<ContextPerplexity>& results) {
  const std::size_t buckets = results.front().buckets.size();
  fmt::print("\nloss by place in the window, in {} equal parts\n{:>9}", buckets, "context");
  for (std::size_t b = 0; b < buckets; ++b) fmt::print("  {:>7}", b + 1);
  fmt::print("\n");
  for (const ContextPerplexity& row : results) {
    fmt::print("{:>8} ", row.context);
    for (const BucketLoss& bucket : row.buckets) {
      fmt::print("  {:>7}", bucket.tokens > 0 ? fmt::format("{:.4f}", bucket.loss) : "-");
    }
    fmt::print("\n");
  }
}

Json as_json(const std::vector<ContextPerplexity>& results, std::int64_t model_context) {
  Json rows = Json::array();
  for (const ContextPerplexity& row : results) {
    Json json{{"context", row.context},
              {"stride", row.stride},
              {"windows", row.windows},
              {"tokens", row.tokens},
              {"loss", row.loss},
              {"perplexity", row.perplexity},
              {"beyond_context", row.context > model_context}};
    if (!row.buckets.empty()) json["buckets"] = Json::array();
    for (const BucketLoss& bucket : row.buckets) {
      json["buckets"].push_back({{"begin", bucket.begin},
                                 {"end", bucket.end},
                                 {"tokens", bucket.tokens},
                                 {"loss", bucket.tokens > 0 ? Json(bucket.loss) : Json()}});
    }
    rows.push_back(std::move(json));
  }
  return rows;
}

void run_verb(const Perplexity& options, World& world) {
  PerplexityOptions settings;
  settings.protocol = parse_protocol(options.protocol);
  settings.stride = options.stride;
  settings.buckets = options.buckets;
  const Subject subject = open_subject(options.model, world);
  const Llama& model = subject.adapted.model;
  const std::int64_t longest = model.config().longest_context();
  settings.contexts = options.contexts.empty() ? std::vector{longest} : options.contexts;
  const TokenRange range = open_range(options, subject);
  PerplexityRun run(model, range, settings);
  for (const std::int64_t context : settings.contexts) {
    if (context > longest) warn("a context of {} is beyond the model's of {}", context, longest);
  }
  const Keeping keeping{options.resume, subject.identity(), &world};
  take_up(run, keeping);
  const std::int64_t before = run.done();
  const auto start = std::chrono::steady_clock::now();
  const std::vector<ContextPerplexity> results = finish(run, keeping);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (!world.leads()) return;
  if (options.json) {
    fmt::print("{}\n", to_text(Json{{"model", options.model.folder},
                                    {"model_context", longest},
                                    {"data", options.data},
                                    {"first_token", range.begin},
                                    {"tokens", range.size},
                                    {"protocol", protocol_name(settings.protocol)},
                                    {"results", as_json(results, longest)},
                                    {"tokens_per_s", static_cast<double>(run.done() - before) / seconds}},
                               2));
    return;
  }
  fmt::print("{} tokens of {}, from token {} on\n", range.size, options.data, range.begin);
  print_table(results, settings.protocol, longest);
  if (options.buckets > 0) print_buckets(results);
}

void add_perplexity(CLI::App& app) {
  const auto options = std::make_shared<Perplexity>();
  CLI::App* verb = app.add_subcommand("perplexity", "Perplexity of a text by length of context");
  add_subject(*verb, options->model);
  verb->add_option("--data", options->data,
                   "A token file, 16-bit tokens (.bin), or text (.txt, .jsonl, also .gz and .zst)")
      ->required();
  verb->add_option("--context", options->contexts, "One or several, separated by commas (default: the model's)")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->type_name("N,N,...");
  verb->add_option("--protocol", options->protocol,
                   "sliding: each token once, with context - stride others before it or more; longlora: every window "
                   "counted in full, as in the papers' tables; blocks: windows side by side")
      ->capture_default_str();
  verb->add_option("--stride", options->stride,
                   "From one window to the next (default: sliding half the context, longlora 256)");
  auto* split =
      verb->add_option("--split", options->split, "whole, or held-out: the last part of the data, as in training")
          ->check(CLI::IsMember({"whole", "held-out"}))
          ->capture_default_str();
  verb->add_option("--held-out", options->held_out, "Its share (default: the recipe's of a run, else 0.1)")
      ->needs(split);
  verb->add_option("--limit", options->limit, "Only so many tokens, the first ones")->check(CLI::PositiveNumber);
  verb->add_option("--buckets", options->buckets, "Also the loss by place in the window, in so many equal parts")
      ->check(CLI::PositiveNumber);
  verb->add_option("--resume", options->resume,
                   "File that keeps the sums, so that the same command goes on where it was cut off");
  verb->add_flag("--json", options->json, "For programs");
  verb->footer("example: tapetune eval perplexity runs/tape --data pg19.tokens --context 1024,2048,4096,8192");
  add_together(*verb, options->together);
  verb->callback([options] {
    options->together.device = options->model.device;
    together(options->together, [&](World& world) { run_verb(*options, world); });
  });
}

}  // namespace

void add_eval(CLI::App& app) {
  CLI::App* verb = app.add_subcommand("eval", "What a model or a run is worth: perplexity, pass keys, multiple choice");
  verb->require_subcommand(1);
  verb->footer("example: tapetune eval perplexity runs/tape --data pg19.tokens --context 1024,2048,4096,8192");
  add_perplexity(*verb);
  add_passkey(*verb);
  add_choice(*verb);
}

}  // namespace tapetune::cli
