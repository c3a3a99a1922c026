#include <CLI/CLI.hpp>

#include "cli/verbs.h"
#include "core/error.h"
#include "core/log.h"
#include "core/memory.h"
#include "core/signals.h"

namespace {

enum ExitCode { ok = 0, bad_input = 1, bad_usage = 2, resumable = 3 };

int run(int argc, char** argv) {
  CLI::App app{"Longer contexts for Llama-style language models, by training few parameters.", "tapetune"};
  app.set_version_flag("--version", "tapetune " TAPETUNE_VERSION);
  app.require_subcommand(1);
  app.fallthrough();
  app.footer("tapetune VERB --help has an example of each.");
  bool quiet = false;
  app.add_flag("-q,--quiet", quiet, "No warnings and no progress on stderr, only errors");
  app.parse_complete_callback([&] { tapetune::set_quiet(quiet); });
  tapetune::cli::add_inspect(app);
  tapetune::cli::add_generate(app);
  tapetune::cli::add_logits(app);
  tapetune::cli::add_tokenize(app);
  tapetune::cli::add_convert(app);
  tapetune::cli::add_import(app);
  tapetune::cli::add_export(app);
  tapetune::cli::add_data(app);
  tapetune::cli::add_adapter(app);
  tapetune::cli::add_check(app);
  tapetune::cli::add_plan(app);
  tapetune::cli::add_recipes(app);
  tapetune::cli::add_train(app);
  tapetune::cli::add_merge(app);
  tapetune::cli::add_verify(app);
  tapetune::cli::add_eval(app);
  tapetune::cli::add_compare(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& done) {  // --help and --version
    return app.exit(done);
  }
  // A full disk behind a pipe or a redirection loses the result; that is no success.
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0)
    tapetune::fail("output", "standard output cannot be written; check the disk.");
  return ok;
}

// One line, but for errors of ours, which may be several lines: fail() makes one, a recipe has one for each mistake.
int report(std::string_view component, std::string text, ExitCode code, bool several = false) {
  for (char& c : text) {
    if ((c == '\n' && !several) || c == '\r') c = ' ';
  }
  fmt::print(stderr, "{}{}\n", component, text);
  return code;
}

}  // namespace

int main(int argc, char** argv) {
  tapetune::set_up_memory();
  tapetune::catch_signals();
  try {
    return run(argc, argv);
  } catch (const CLI::ParseError& error) {
    return report("[usage] ", std::string(error.what()) + "; see tapetune --help", bad_usage);
  } catch (const tapetune::Interrupted& error) {
    return report("", error.what(), resumable);
  } catch (const tapetune::Error& error) {
    return report("", error.what(), bad_input, /*several=*/true);
  } catch (const c10::Error& error) {
    return report("[torch] ", error.what_without_backtrace(), bad_input);
  } catch (const std::bad_alloc&) {
    return report("[memory] ", "there is not enough memory; use a shorter sequence or a smaller model", bad_input);
  } catch (const std::exception& error) {
    return report("[internal] ", error.what(), bad_input);
  }
}
