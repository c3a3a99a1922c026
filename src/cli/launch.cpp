#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <thread>

#include "cli/ending.h"
#include "cli/together.h"
#include "cli/usage.h"
#include "cli/verbs.h"
#include "core/cores.h"
#include "core/error.h"
#include "core/log.h"
#include "core/signals.h"
#include "distributed/meeting_place.h"

namespace tapetune::cli {

namespace {

struct Child {
  pid_t process = 0;
  bool ended = false;
  int status = 0;
};

// The program's own file. Ranks are started from it rather than through /proc/self/exe, which would name them "exe".
std::filesystem::path own_program() {
  std::error_code status;
  const std::filesystem::path link = "/proc/self/exe", program = std::filesystem::read_symlink(link, status);
  if (program.filename().string().starts_with("ld-")) {
    fail("launch", "tapetune was started through {}, which cannot start ranks; run tapetune itself.", program.string());
  }
  return std::filesystem::exists(program, status) ? program : link;  // a file that was replaced since
}

// The program again, as one of the ranks.
pid_t start(const std::filesystem::path& program, const std::vector<std::string>& command, int rank, int ranks,
            int port) {
  const pid_t parent = ::getpid(), child = ::fork();
  if (child != 0) return child;
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);  // a rank does not outlive the launcher
  if (::getppid() != parent) ::_exit(bad_input);
  ::setpgid(0, 0);  // Ctrl-C reaches the launcher alone, which passes it on: a second one would end a rank at once
  const auto set = [](const char* name, const std::string& value) { ::setenv(name, value.c_str(), 1); };
  set("RANK", std::to_string(rank));
  set("LOCAL_RANK", std::to_string(rank));
  set("WORLD_SIZE", std::to_string(ranks));
  set("MASTER_ADDR", "127.0.0.1");
  set("MASTER_PORT", std::to_string(port));
  set("TORCHELASTIC_USE_AGENT_STORE", "True");
  set("TORCHELASTIC_RESTART_COUNT", "0");
  ::setenv("OMP_NUM_THREADS", std::to_string(std::max(1, available_cores() / ranks)).c_str(), 0);
  std::vector<char*> words;
  std::string name = "tapetune";
  words.push_back(name.data());
  std::vector<std::string> copy = command;
  std::string hush = "-q";
  if (quiet()) words.push_back(hush.data());
  for (std::string& word : copy) words.push_back(word.data());
  words.push_back(nullptr);
  ::execv(program.c_str(), words.data());
  ::_exit(bad_input);
}

void signal_all(const std::vector<Child>& children, int number) {
  for (const Child& child : children) {
    if (!child.ended) ::kill(child.process, number);
  }
}

// Until all have ended. When one fails the others notice by themselves, and rank 0 says what it was; those who do not
// end soon after are ended.
void wait_for_all(std::vector<Child>& children) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::seconds grace{15};  // longer than rank 0 takes to find out
  std::optional<Clock::time_point> first_failure;
  bool passed_on = false, told = false;
  for (std::size_t left = children.size(); left > 0;) {
    for (Child& child : children) {
      if (child.ended || ::waitpid(child.process, &child.status, WNOHANG) == 0) continue;
      child.ended = true;
      --left;
      if (child.status != 0 && !first_failure) first_failure = Clock::now();
    }
    if (interrupted() && !std::exchange(passed_on, true)) signal_all(children, SIGTERM);
    if (first_failure && Clock::now() - *first_failure > grace && !std::exchange(told, true)) {
      signal_all(children, SIGKILL);  // a stopped process ends by nothing else
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

int launch(int ranks, const std::vector<std::string>& command) {
  const std::filesystem::path program = own_program();
  const auto store = open_meeting_place();
  std::vector<Child> children(static_cast<std::size_t>(ranks));
  for (int r = 0; r < ranks; ++r)
    children[static_cast<std::size_t>(r)].process = start(program, command, r, ranks, store->getPort());
  wait_for_all(children);
  const int first = children.front().status;
  if (WIFSIGNALED(first)) {
    fail("launch", "rank 0 was killed by signal {} ({}); rerun the same command to resume from the last checkpoint.",
         WTERMSIG(first), ::strsignal(WTERMSIG(first)));
  }
  for (const Child& child : children) {
    if (child.status != 0) return WIFEXITED(child.status) ? WEXITSTATUS(child.status) : bad_input;
  }
  return ok;
}

}  // namespace

namespace {

// "train, eval perplexity": the commands whose work several processes can share.
std::vector<std::string> sharing_commands(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands({})) {
    if (shares_work(*command)) names.push_back(command->get_name());
    for (const CLI::App* inner : command->get_subcommands({})) {
      if (shares_work(*inner)) names.push_back(command->get_name() + " " + inner->get_name());
    }
  }
  return names;
}

// Any other command would do the same work several times, into the same files.
void require_sharing(const CLI::App& app, const std::vector<std::string>& words) {
  const CLI::App& command = find_command(app, words);
  if (shares_work(command)) return;
  if (const auto within = sharing_commands(command); !within.empty()) {  // "eval", of which each command shares work
    throw UsageError(fmt::format("launch: {0} needs a command: {1}; see {0} --help", command_name(command),
                                 fmt::join(within, ", ")));
  }
  throw UsageError(fmt::format("launch: {} runs in one process; run it without launch. Commands that share work: {}",
                               command_name(command), fmt::join(sharing_commands(app), ", ")));
}

}  // namespace

void add_launch(CLI::App& app) {
  struct Options {
    int ranks = 0;
    std::vector<std::string> command;
  };
  const auto options = std::make_shared<Options>();
  CLI::App* verb = app.add_subcommand(
      "launch", "Run a command in several processes of this machine: one per GPU, or each on a share of the cores");
  verb->add_option("--nproc", options->ranks, "Number of processes (ranks)")->required()->check(CLI::Range(1, 1024));
  verb->add_option("command", options->command, "train, compare or eval, with its arguments")
      ->required()
      ->option_text("-- COMMAND [ARGUMENT...]");
  verb->footer(
      "For several machines use torchrun --no-python, srun or mpirun in place of launch.\n\n"
      "example: tapetune launch --nproc 8 -- train llama2-7b-8k/tape model=/models/Llama-2-7b-hf data=rp.tokens");
  verb->callback([options, &app] {
    require_sharing(app, options->command);
    const int code = launch(options->ranks, options->command);
    if (code != ok) std::exit(code);
  });
}

}  // namespace tapetune::cli
