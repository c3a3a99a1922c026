#include <CLI/CLI.hpp>

#include "cli/verbs.h"
#include "core/error.h"
#include "core/log.h"
#include "core/signals.h"

namespace {

enum ExitCode { ok = 0, bad_input = 1, bad_usage = 2, resumable = 3 };

int run(int argc, char** argv) {
  CLI::App app{"Longer contexts for Llama-style language models, by training few parameters.", "tapetune"};
  app.set_version_flag("--version", "tapetune " TAPETUNE_VERSION);
  app.require_subcommand(1);
  app.fallthrough();
  app.footer("tapetune VERB --help has an example of each.");
  bool quiet = false, verbose = false;
  app.add_flag("-q,--quiet", quiet, "Errors only on stderr");
  app.add_flag("-v,--verbose", verbose, "More on stderr");
  app.parse_complete_callback([&] {
    using tapetune::LogLevel;
    tapetune::set_log_level(quiet ? LogLevel::quiet : verbose ? LogLevel::verbose : LogLevel::normal);
  });
  tapetune::cli::add_inspect(app);
  tapetune::cli::add_generate(app);
  tapetune::cli::add_logits(app);
  tapetune::cli::add_tokenize(app);
  tapetune::cli::add_convert(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& done) {  // --help and --version
    return app.exit(done);
  } catch (const CLI::ParseError& error) {
    fmt::print(stderr, "[usage] {}; see tapetune{} --help\n", error.what(),
               app.get_subcommands().empty() ? "" : " " + app.get_subcommands().front()->get_name());
    return bad_usage;
  }
  return ok;
}

}  // namespace

int main(int argc, char** argv) {
  tapetune::catch_signals();
  try {
    return run(argc, argv);
  } catch (const tapetune::Interrupted& error) {
    fmt::print(stderr, "{}\n", error.what());
    return resumable;
  } catch (const tapetune::Error& error) {
    fmt::print(stderr, "{}\n", error.what());
    return bad_input;
  } catch (const c10::Error& error) {
    fmt::print(stderr, "[torch] {}\n", error.what_without_backtrace());
    return bad_input;
  } catch (const std::bad_alloc&) {
    fmt::print(stderr, "[memory] there is not enough memory; use a shorter sequence or a smaller model\n");
    return bad_input;
  } catch (const std::exception& error) {
    fmt::print(stderr, "[internal] {}\n", error.what());
    return bad_input;
  }
}
