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
#include "eval/choice.h"

namespace tapetune::cli {

namespace {

struct Choice {
  ModelOptions model;
  ChoiceSource source;
  std::string data, shots_from, resume, details;
  bool json = false;
  DistributedOptions distributed;
};

void print_score(const ChoiceScore& score) {
  const auto share = [](double value, double error) {
    return fmt::format("{:.4f} ± {}", value, std::isnan(error) ? "-" : fmt::format("{:.4f}", error));
  };
  print_out("{:<35}  {:>9}  {:>15}  {:>15}\n", score.name, score.questions, share(score.acc, score.acc_stderr),
            share(score.acc_norm, score.acc_norm_stderr));
}

void print_table(const ChoiceResults& results) {
  print_out("{:<35}  {:>9}  {:>15}  {:>15}\n", "", "questions", "acc", "acc_norm");
  if (results.parts.size() > 1) {
    for (const ChoiceScore& score : results.parts) print_score(score);
    print_out("\n");
  }
  for (const ChoiceScore& score : results.groups) print_score(score);
  print_score(results.all);
}

Json as_json(const ChoiceScore& score) {
  return {{"name", score.name},         {"questions", score.questions},
          {"acc", score.acc},           {"acc_stderr", score.acc_stderr},
          {"acc_norm", score.acc_norm}, {"acc_norm_stderr", score.acc_norm_stderr}};
}

Json as_json(const std::vector<ChoiceScore>& scores) {
  Json rows = Json::array();
  for (const ChoiceScore& score : scores) rows.push_back(as_json(score));
  return rows;
}

void write_details(const ChoiceRun& run, const std::string& path) {
  const ChoiceTask& task = run.task();
  WholeFile file(path, /*replace=*/true);
  for (std::size_t i = 0; i < task.questions.size(); ++i) {
    const ChoiceQuestion& question = task.questions[i];
    const auto [best, best_norm] = chosen(question, run.log_likelihoods()[i]);
    const Json line{{"part", task.parts[question.part].name},
                    {"prompt", task.parts[question.part].header + question.text},
                    {"choices", question.choices},
                    {"answer", question.answer},
                    {"log_likelihoods", run.log_likelihoods()[i]},
                    {"chosen", best},
                    {"chosen_norm", best_norm}};
    file.write(to_text(line) + "\n");
  }
  file.commit();
}

void run_verb(const Choice& verb, World& world) {
  if (world.is_rank0() && !verb.details.empty()) {
    require_writable(verb.details, /*replace=*/true);
    require_not_input(verb.details, std::vector<std::filesystem::path>{verb.model.folder, verb.data, verb.shots_from});
  }
  ChoiceSource source = verb.source;
  source.data = verb.data;
  source.shots_from = verb.shots_from;
  ChoiceTask task = read_task(source);
  const LoadedModel loaded = open_loaded_model(verb.model, world);
  const Tokenizer tokenizer = loaded.open_tokenizer();
  const std::int64_t context = loaded.adapted.model.config().longest_context();
  ChoiceRun run(loaded.adapted.model, tokenizer, std::move(task));
  const ResumeFile resume_file{verb.resume, loaded.identity(), &world};
  resume(run, resume_file);
  const std::int64_t before = run.done();
  const auto start = std::chrono::steady_clock::now();
  const ChoiceResults results = finish(run, resume_file);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (!world.is_rank0()) return;
  if (!verb.details.empty()) write_details(run, verb.details);
  if (run.shortened() > 0) {
    warn("{} longer than the model's context of {}: truncated on the left", counted(run.shortened(), "question"),
         context);
  }
  if (verb.json) {
    print_out("{}\n", to_text(Json{{"model", verb.model.folder},
                                   {"model_context", context},
                                   {"task", run.task().name},
                                   {"data", verb.data},
                                   {"shots", run.task().shots},
                                   {"shortened", run.shortened()},
                                   {"results", as_json(results.all)},
                                   {"groups", as_json(results.groups)},
                                   {"parts", as_json(results.parts)},
                                   {"tokens_computed", run.computed()},
                                   {"questions_per_s", static_cast<double>(run.done() - before) / seconds}},
                              2));
    return;
  }
  print_out("{} of {}, {}\n\n", run.task().name, verb.data, counted(run.task().shots, "shot"));
  print_table(results);
  if (run.shortened() > 0) {
    print_out("{} truncated on the left: longer than the model's context of {}\n", counted(run.shortened(), "question"),
              context);
  }
}

}  // namespace

void add_choice(CLI::App& app) {
  const auto options = std::make_shared<Choice>();
  ChoiceSource& source = options->source;
  CLI::App* verb =
      app.add_subcommand("choice", "Multiple choice by log-likelihood, as in lm-evaluation-harness: MMLU, ARC");
  add_loaded_model(*verb, options->model);
  verb->add_option("--task", source.task, "mmlu or arc")->required();
  verb->add_option("--data", options->data,
                   "mmlu: folder with dev/SUBJECT_dev.csv and test/SUBJECT_test.csv; arc: JSON or JSONL file")
      ->required();
  verb->add_option("--shots", source.shots, "Few-shot examples (default: 5 from the dev split for mmlu, 0 for arc)")
      ->transform(whole_number(0));
  verb->add_option("--shots-from", options->shots_from, "arc: file with the few-shot examples");
  verb->add_option("--split", source.split, "mmlu: test, val or dev")
      ->check(CLI::IsMember({"test", "val", "dev"}))
      ->capture_default_str();
  verb->add_option("--subjects", source.subjects, "mmlu: evaluate only these subjects (default: all)")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->type_name("NAME,NAME,...");
  verb->add_option("--limit", source.limit, "Use only the first N questions of each subject")
      ->transform(whole_number(1));
  verb->add_option("--resume", options->resume, "File that stores partial results: rerun the same command to resume");
  verb->add_option("--details", options->details,
                   "JSONL file to write: the prompt and the log-likelihood of each choice, one question per line");
  verb->add_flag("--json", options->json, "Print the results as JSON");
  verb->footer("example: tapetune eval choice runs/tape --task mmlu --data mmlu/");
  add_distributed(*verb, options->distributed);
  verb->callback([options] {
    options->distributed.device = options->model.device;
    run_distributed(options->distributed, [&](World& world) { run_verb(*options, world); });
  });
}

}  // namespace tapetune::cli
