#include <stdlib.h>
#include <CLI/CLI.hpp>

#include <chrono>
#include <optional>

#include "cli/loaded_model.h"
#include "cli/numbers.h"
#include "cli/run_distributed.h"
#include "cli/verbs.h"
#include "core/error.h"
#include "core/json.h"
#include "core/log.h"
#include "core/output.h"
#include "data/pack.h"
#include "eval/perplexity.h"
#include "run/open.h"
#include "run/run_data.h"

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
    fail("eval", "{}: the model has no tokenizer; pack the text first (tapetune data pack).", path);
  }
  const Tokenizer tokenizer = Tokenizer::open(tokenizer_folder);
  const TokenIds framed = tokenizer.encode("a");
  std::string folder = (fs::temp_directory_path() / "tapetune-eval-XXXXXX").string();
  if (::mkdtemp(folder.data()) == nullptr) {
    fail("eval", "{}: cannot create this folder for the tokens of {}; set TMPDIR to another.", folder, path);
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
  DistributedOptions distributed;
};

// The recipe of a run in the folder where it is; none: not a run.
std::optional<Recipe> recipe_here(const Perplexity& options, const LoadedModel& loaded) {
  std::optional<Recipe> recipe = loaded.recipe;
  if (recipe) recipe->run = identify(options.model.folder).run.string();
  return recipe;
}

// What training packed from this text, for its held-out part: with the same tokens around documents, it begins at the
// same place. Empty: nothing.
fs::path packed_by_training(const Perplexity& options, const LoadedModel& loaded) {
  const std::optional<Recipe> recipe = recipe_here(options, loaded);
  if (!recipe || options.split != "held-out") return {};
  const std::optional<TrainingData> source = find_training_data(*recipe, options.data);
  if (!source || !source->whole || !is_text_data(*recipe, source->index)) return {};
  std::error_code status;
  const fs::path tokens = token_path(*recipe, source->index);
  return fs::exists(tokens, status) ? tokens : fs::path();
}

TokenRange open_range(const Perplexity& options, const LoadedModel& loaded) {
  const ModelConfig& config = loaded.adapted.model.config();
  const fs::path packed = packed_by_training(options, loaded);
  const TokenFile file =
      packed.empty() && is_text(options.data)
          ? tokenised(options.data, loaded.tokenizer, options.model.threads)
          : open_tokens(packed.empty() ? fs::path(options.data) : packed, known_vocabulary(loaded.tokenizer), config);
  TokenRange range{file, 0, file.size()};
  if (options.split == "held-out") {
    const double recipes = loaded.recipe ? loaded.recipe->held_out : 0;
    const double share = options.held_out >= 0 ? options.held_out : recipes > 0 ? recipes : 0.1;
    range.begin = held_out_begin(file, share, loaded.recipe ? loaded.recipe->context : 1);
    range.size -= range.begin;
  }
  if (options.limit > 0) range.size = std::min(range.size, options.limit);
  return range;
}

void warn_of_training_text(const Perplexity& options, const LoadedModel& loaded) {
  const std::optional<Recipe> recipe = recipe_here(options, loaded);
  const std::optional<TrainingData> source =
      recipe ? find_training_data(*recipe, options.data) : std::optional<TrainingData>();
  if (!source || (source->whole && options.split == "held-out")) return;
  const std::string all = source->whole ? "" : fmt::format("--data {} ", recipe->data[source->index].path);
  warn("{} is {}the run's training data, so its perplexity does not show how the model does on new text; {}",
       options.data, source->whole ? "" : "part of ",
       recipe->held_out > 0 ? fmt::format("{}--split held-out measures the part that was held out", all)
                            : "use another text, or train with held_out=0.1 and give --split held-out");
}

std::string about(Protocol protocol) {
  switch (protocol) {
    case Protocol::longlora:
      return "every token of every window scored, as in the papers' tables";
    case Protocol::sliding:
      return "each token scored once, after at least context - stride others";
    default:
      return "windows that do not overlap";
  }
}

void print_table(const std::vector<ContextPerplexity>& results, Protocol protocol, std::int64_t model_context) {
  print_out("protocol {}: {}\n\n", protocol_name(protocol), about(protocol));
  print_out("{:>9}  {:>7}  {:>8}  {:>11}  {:>8}  {:>10}\n", "context", "stride", "windows", "tokens", "loss",
            "perplexity");
  bool beyond = false;
  for (const ContextPerplexity& row : results) {
    const bool marked = row.context > model_context;
    beyond = beyond || marked;
    print_out("{:>8}{}  {:>7}  {:>8}  {:>11}  {:>8.4f}  {:>10.5g}\n", row.context, marked ? "*" : " ", row.stride,
              row.windows, row.tokens, row.loss, row.perplexity);
  }
  if (beyond) print_out("* longer than the model's context of {}\n", model_context);
}

void print_buckets(const std::vector<ContextPerplexity>& results) {
  const std::size_t buckets = results.front().buckets.size();
  print_out("\nloss by position in the window, in {} equal parts\n{:>9}", buckets, "context");
  for (std::size_t b = 0; b < buckets; ++b) print_out("  {:>7}", b + 1);
  print_out("\n");
  for (const ContextPerplexity& row : results) {
    print_out("{:>8} ", row.context);
    for (const BucketLoss& bucket : row.buckets) {
      print_out("  {:>7}", bucket.tokens > 0 ? fmt::format("{:.4f}", bucket.loss) : "-");
    }
    print_out("\n");
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
  const LoadedModel loaded = open_loaded_model(options.model, world);
  const Llama& model = loaded.adapted.model;
  const std::int64_t longest = model.config().longest_context();
  settings.contexts = options.contexts.empty() ? std::vector{longest} : options.contexts;
  const TokenRange range = open_range(options, loaded);
  if (world.is_rank0()) warn_of_training_text(options, loaded);
  PerplexityRun run(model, range, settings);
  for (const std::int64_t context : settings.contexts) {
    if (context > longest) warn("a context of {} is longer than the model's context of {}", context, longest);
  }
  const ResumeFile resume_file{options.resume, loaded.identity(), &world};
  resume(run, resume_file);
  const std::int64_t before = run.done();
  const auto start = std::chrono::steady_clock::now();
  const std::vector<ContextPerplexity> results = finish(run, resume_file);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (!world.is_rank0()) return;
  if (options.json) {
    print_out("{}\n", to_text(Json{{"model", options.model.folder},
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
  print_out("{} tokens of {}, starting at token {}\n", range.size, options.data, range.begin);
  print_table(results, settings.protocol, longest);
  if (options.buckets > 0) print_buckets(results);
}

void add_perplexity(CLI::App& app) {
  const auto options = std::make_shared<Perplexity>();
  CLI::App* verb = app.add_subcommand("perplexity", "Perplexity of a text at one or several context lengths");
  add_loaded_model(*verb, options->model);
  verb->add_option("--data", options->data,
                   "Token file, 16-bit token ids (.bin), or text (.txt, .jsonl, also .gz and .zst)")
      ->required();
  verb->add_option("--context", options->contexts, "Context lengths in tokens (default: the model's context)")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->transform(context_length())
      ->type_name("N,N,...");
  verb->add_option(
          "--protocol", options->protocol,
          "sliding: each token is scored once, with at least context - stride tokens before it; longlora: every "
          "token of every window is scored, as in the papers' tables; blocks: windows that do not overlap")
      ->capture_default_str();
  verb->add_option("--stride", options->stride,
                   "Tokens from one window to the next (default: half the context for sliding, 256 for longlora)");
  auto* split = verb->add_option("--split", options->split,
                                 "whole, or held-out: the last part of the data, which training leaves out")
                    ->check(CLI::IsMember({"whole", "held-out"}))
                    ->capture_default_str();
  verb->add_option("--held-out", options->held_out,
                   "Fraction of the data that is held out (default: that of the run's recipe, else 0.1)")
      ->needs(split);
  verb->add_option("--limit", options->limit, "Use only the first N tokens")->transform(whole_number(1));
  verb->add_option("--buckets", options->buckets, "Also print the loss by position in the window, in N equal parts")
      ->transform(whole_number(1));
  verb->add_option("--resume", options->resume, "File that stores partial results: rerun the same command to resume");
  verb->add_flag("--json", options->json, "Print the results as JSON");
  verb->footer("example: tapetune eval perplexity runs/tape --data pg19.tokens --context 1024,2048,4096,8192");
  add_distributed(*verb, options->distributed);
  verb->callback([options] {
    options->distributed.device = options->model.device;
    run_distributed(options->distributed, [&](World& world) { run_verb(*options, world); });
  });
}

}  // namespace

void add_eval(CLI::App& app) {
  CLI::App* verb =
      app.add_subcommand("eval", "Evaluate a model or a run: perplexity, passkey retrieval, multiple choice");
  verb->require_subcommand(1);
  verb->footer("example: tapetune eval perplexity runs/tape --data pg19.tokens --context 1024,2048,4096,8192");
  add_perplexity(*verb);
  add_passkey(*verb);
  add_choice(*verb);
}

}  // namespace tapetune::cli
