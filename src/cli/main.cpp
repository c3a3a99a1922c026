#include <CLI/CLI.hpp>

#include "cli/ending.h"
#include "cli/verbs.h"
#include "core/error.h"
#include "core/log.h"
#include "core/memory.h"
#include "core/signals.h"

namespace {

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
  tapetune::cli::add_launch(app);
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
  return tapetune::cli::ok;
}

}  // namespace

int main(int argc, char** argv) {
  tapetune::set_up_memory();
  tapetune::catch_signals();
  try {
    return run(argc, argv);
  } catch (...) {
    const tapetune::cli::Ending end = tapetune::cli::ending(std::current_exception());
    fmt::print(stderr, "{}\n", end.text);
    return end.code;
  }
}
