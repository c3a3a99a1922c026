#include "cli/run.h"

#include <ATen/Parallel.h>
#include <CLI/CLI.hpp>

#include <cstdlib>

#include "cli/exit_code.h"
#include "cli/help_page.h"
#include "cli/usage.h"
#include "cli/verbs.h"
#include "cli/version.h"
#include "core/cores.h"
#include "core/log.h"
#include "core/mapped_file.h"
#include "core/memory.h"
#include "core/moment.h"
#include "core/output.h"
#include "core/signals.h"

namespace tapetune {

namespace {

void parse(CLI::App& app, std::vector<std::string> words) {
  words = cli::expand_help(app, std::move(words));
  try {
    app.parse(std::vector<std::string>(words.rbegin(), words.rend()));
  } catch (const CLI::CallForHelp&) {
    cli::find_command(app, words);  // the help of a command that does not exist is an error
    throw;
  } catch (const CLI::Success&) {  // --version
    throw;
  } catch (const CLI::ParseError& error) {
    throw cli::explain_usage(app, error, words);
  }
}

int run(int argc, char** argv) {
  CLI::App app{
      "Extend the context of Llama-style models by fine-tuning a small fraction of their parameters (TAPE, "
      "LoRA, LongLoRA).",
      "tapetune"};
  app.formatter(std::make_shared<cli::HelpPage>());
  app.set_version_flag("--version", [] { return cli::version_text(); }, "Version, commit, LibTorch, devices");
  app.require_subcommand(1);
  app.fallthrough();
  app.footer("tapetune help COMMAND prints a command's options and an example.");
  bool quiet = false;
  app.add_flag("-q,--quiet", quiet, "Print errors only: no notes, warnings or progress on stderr");
  app.parse_complete_callback([&] { set_quiet(quiet); });
  // In the order of a typical workflow, which is how --help lists them.
  cli::add_recipes(app);
  cli::add_data(app);
  cli::add_plan(app);
  cli::add_train(app);
  cli::add_compare(app);
  cli::add_eval(app);
  cli::add_generate(app);
  cli::add_merge(app);
  cli::add_verify(app);
  cli::add_export(app);
  cli::add_import(app);
  cli::add_convert(app);
  cli::add_inspect(app);
  cli::add_tokenize(app);
  cli::add_logits(app);
  cli::add_adapter(app);
  cli::add_check(app);
  cli::add_launch(app);
  app.add_subcommand("help", "Print the help of a command: tapetune help train");  // see expand_help
  try {
    parse(app, {argv + 1, argv + argc});
  } catch (const CLI::Success& done) {
    return app.exit(done);
  }
  flush_out();  // a full disk behind a pipe or a redirection loses the result; that is no success
  return cli::ok;
}

}  // namespace

int run_cli(int argc, char** argv) {
  keep_standard_streams();
  at_moment("start");
  catch_signals();  // first of all: until then a signal ends the program, and with it a run of several ranks
  watch_mapped_files();
  set_up_memory();
  // OpenMP knows the affinity mask, but no container's quota; a number that the user gave wins.
  if (std::getenv("OMP_NUM_THREADS") == nullptr) {
    const int cores = available_cores();
    if (cores < at::get_num_threads()) at::set_num_threads(cores);
  }
  try {
    return run(argc, argv);
  } catch (...) {
    const cli::ExitMessage message = cli::exit_message(std::current_exception());
    cli::tell(message);
    return message.code;
  }
}

}  // namespace tapetune
