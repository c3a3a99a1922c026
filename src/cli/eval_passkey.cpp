#include <CLI/CLI.hpp>

#include <chrono>

#include "cli/loaded_model.h"
#include "cli/numbers.h"
#include "cli/run_distributed.h"
#include "cli/verbs.h"
#include "core/digits.h"
#include "core/file.h"
#include "core/log.h"
#include "core/output.h"
#include "eval/passkey.h"

namespace tapetune::cli {

namespace {

struct Passkey {
  ModelOptions model;
  PasskeyOptions options;
  std::string resume, details;
  bool json = false;
  DistributedOptions distributed;
};

double accuracy(const PasskeyCell& cell) {
  return static_cast<double>(cell.correct) / static_cast<double>(std::max<std::int64_t>(1, cell.trials));
}

std::string mark(bool beyond) { return beyond ? "*" : " "; }

// A row a length.
void print_lengths(const std::vector<PasskeyCell>& cells, std::int64_t model_context) {
  print_out("{:>9}  {:>10}  {:>7}  {:>8}  {:>8}\n", "tokens", "characters", "trials", "correct", "accuracy");
  for (const PasskeyCell& cell : cells) {
    print_out("{:>8.0f}{}  {:>10}  {:>7}  {:>8}  {:>8.2f}\n", cell.tokens, mark(cell.longest > model_context),
              cell.garbage, cell.trials, cell.correct, accuracy(cell));
  }
}

// A row a length, a column a depth.
void print_grid(const std::vector<PasskeyCell>& cells, std::size_t depths, std::int64_t model_context) {
  print_out("accuracy by length and depth (0 is the start of the text)\n{:>9}", "tokens");
  for (std::size_t d = 0; d < depths; ++d) print_out("  {:>4}", *cells[d].depth);
  print_out("\n");
  for (std::size_t row = 0; row < cells.size(); row += depths) {
    double tokens = 0;
    bool beyond = false;
    for (std::size_t d = 0; d < depths; ++d) {
      tokens += cells[row + d].tokens / static_cast<double>(depths);
      beyond = beyond || cells[row + d].longest > model_context;
    }
    print_out("{:>8.0f}{}", tokens, mark(beyond));
    for (std::size_t d = 0; d < depths; ++d) print_out("  {:>4.2f}", accuracy(cells[row + d]));
    print_out("\n");
  }
}

Json as_json(const std::vector<PasskeyCell>& cells, std::int64_t model_context) {
  Json rows = Json::array();
  for (const PasskeyCell& cell : cells) {
    rows.push_back({{"context", cell.tokens},
                    {"asked", cell.context ? Json(*cell.context) : Json()},
                    {"characters", cell.garbage},
                    {"depth", cell.depth ? Json(*cell.depth) : Json()},
                    {"trials", cell.trials},
                    {"correct", cell.correct},
                    {"accuracy", accuracy(cell)},
                    {"beyond_context", cell.longest > model_context}});
  }
  return rows;
}

void write_details(const PasskeyRun& run, const Tokenizer& tokenizer, const std::string& path) {
  const std::vector<PasskeyCell> cells = run.results();
  WholeFile file(path, /*replace=*/true);
  for (const PasskeyTrial& trial : run.trials()) {
    const PasskeyCell& cell = cells[trial.cell];
    const PasskeyPrompt prompt = run.prompt(trial);
    const Json line{{"characters", cell.garbage},
                    {"depth", cell.depth ? Json(*cell.depth) : Json()},
                    {"seed", trial.seed},
                    {"key", prompt.key},
                    {"prompt_tokens", tokenizer.encode_prompt(prompt.text)},
                    {"answer_tokens", *trial.answer},
                    {"answer", tokenizer.decode(*trial.answer)},
                    {"correct", run.judge().is_correct(*trial.answer, prompt.key)}};
    file.write(to_text(line) + "\n");
  }
  file.commit();
}

void measure(const Passkey& verb, const LoadedModel& loaded, World& world) {
  const Tokenizer tokenizer = loaded.open_tokenizer();
  const Llama& model = loaded.adapted.model;
  const std::int64_t context = model.config().longest_context();
  PasskeyRun run(model, tokenizer, verb.options);
  std::int64_t longest = 0;
  for (const PasskeyCell& cell : run.results()) longest = std::max(longest, cell.longest);
  const ResumeFile resume_file{verb.resume, loaded.identity(), &world};
  resume(run, resume_file);
  if (longest > context) warn("prompts of up to {} tokens are longer than the model's context of {}", longest, context);
  const auto start = std::chrono::steady_clock::now();
  const std::vector<PasskeyCell> cells = finish(run, resume_file);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (!world.is_rank0()) return;
  if (!verb.details.empty()) write_details(run, tokenizer, verb.details);
  if (verb.json) {
    print_out("{}\n", to_text(Json{{"model", verb.model.folder},
                                   {"model_context", context},
                                   {"seed", verb.options.seed},
                                   {"matched", run.judge().by_ids() ? "tokens" : "text"},
                                   {"cells", as_json(cells, context)},
                                   {"tokens_read", run.read()},
                                   {"tokens_computed", run.computed()},
                                   {"seconds", seconds}},
                              2));
    return;
  }
  print_out("passkey retrieval: {} for each length{}, seeds from {}\nanswers compared as {}\n\n",
            counted(verb.options.trials, "trial"), verb.options.depths.empty() ? "" : " and depth", verb.options.seed,
            run.judge().by_ids() ? "token ids" : "text");
  if (verb.options.depths.empty()) {
    print_lengths(cells, context);
  } else {
    print_grid(cells, verb.options.depths.size(), context);
  }
  if (longest > context) print_out("* longer than the model's context of {}\n", context);
}

void run_verb(const Passkey& verb, World& world) {
  if (world.is_rank0() && !verb.details.empty()) {
    require_writable(verb.details, /*replace=*/true);
    require_not_input(verb.details, std::vector<std::filesystem::path>{verb.model.folder});
  }
  const LoadedModel loaded = open_loaded_model(verb.model, world);
  try {
    measure(verb, loaded, world);
  } catch (const NotFinite& error) {
    fail_naming_weight(loaded, error);
  }
}

}  // namespace

void add_passkey(CLI::App& app) {
  const auto options = std::make_shared<Passkey>();
  PasskeyOptions& wanted = options->options;
  CLI::App* verb = app.add_subcommand("passkey", "Passkey retrieval: find a number hidden in a long text");
  add_loaded_model(*verb, options->model, /*seeded=*/true);
  auto* contexts = verb->add_option("--context", wanted.contexts,
                                    "Lengths of prompt plus answer in tokens (default: the papers' lengths)")
                       ->delimiter(',')
                       ->allow_extra_args(false)
                       ->transform(context_length())
                       ->type_name("N,N,...");
  verb->add_option("--interval", wanted.interval, "Step between the papers' lengths, in tokens as they count them")
      ->transform(whole_number(1))
      ->excludes(contexts)
      ->capture_default_str();
  verb->add_option("--max-tokens", wanted.max_tokens, "Longest of the papers' lengths")
      ->transform(whole_number(1))
      ->excludes(contexts)
      ->capture_default_str();
  verb->add_option("--depths", wanted.depths,
                   "Positions of the number, 0 (start) to 1 (end), for a grid of length and depth (default: random)")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->type_name("D,D,...");
  verb->add_option("--trials", wanted.trials, "Trials for each length and depth")
      ->transform(whole_number(1))
      ->capture_default_str();
  verb->add_option("--seed", wanted.seed,
                   "Seed of the first trial and of a method's initial values (default: 0, as in the papers)");
  verb->add_option("--resume", options->resume, "File that stores partial results: rerun the same command to resume");
  verb->add_option("--details", options->details, "JSONL file to write: prompt and answer, one trial per line");
  verb->add_flag("--json", options->json, "Print the results as JSON");
  verb->footer("example: tapetune eval passkey runs/tape --context 1024,2048,4096,8192 --depths 0,0.25,0.5,0.75,1");
  add_distributed(*verb, options->distributed);
  verb->callback([options] {
    options->model.seed = options->options.seed;
    options->distributed.device = options->model.device;
    run_distributed(options->distributed, [&](World& world) { run_verb(*options, world); });
  });
}

}  // namespace tapetune::cli
