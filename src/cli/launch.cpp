#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <csignal>
#include <thread>

#include "cli/ending.h"
#include "cli/verbs.h"
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

// The program again, as one of the ranks.
pid_t start(const std::vector<std::string>& command, int rank, int ranks, int port) {
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
  const unsigned cores = std::max(1U, std::thread::hardware_concurrency());
  ::setenv("OMP_NUM_THREADS", std::to_string(std::max(1U, cores / static_cast<unsigned>(ranks))).c_str(), 0);
  std::vector<char*> words;
  std::string name = "tapetune";
  words.push_back(name.data());
  std::vector<std::string> copy = command;
  std::string hush = "-q";
  if (quiet()) words.push_back(hush.data());
  for (std::string& word : copy) words.push_back(word.data());
  words.push_back(nullptr);
  ::execv("/proc/self/exe", words.data());
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
  const auto store = open_meeting_place();
  std::vector<Child> children(static_cast<std::size_t>(ranks));
  for (int r = 0; r < ranks; ++r)
    children[static_cast<std::size_t>(r)].process = start(command, r, ranks, store->getPort());
  wait_for_all(children);
  const int first = children.front().status;
  if (WIFSIGNALED(first)) {
    fail("launch", "rank 0 was ended by signal {} ({}); the same command goes on from the last checkpoint.",
         WTERMSIG(first), ::strsignal(WTERMSIG(first)));
  }
  for (const Child& child : children) {
    if (child.status != 0) return WIFEXITED(child.status) ? WEXITSTATUS(child.status) : bad_input;
  }
  return ok;
}

}  // namespace

void add_launch(CLI::App& app) {
  struct Options {
    int ranks = 0;
    std::vector<std::string> command;
  };
  const auto options = std::make_shared<Options>();
  CLI::App* verb = app.add_subcommand(
      "launch", "Runs a verb in several processes of this machine, one a GPU or a share of the cores");
  verb->add_option("--nproc", options->ranks, "How many")->required()->check(CLI::Range(1, 1024));
  verb->add_option("command", options->command, "The verb and its words, behind --")->required();
  verb->footer(
      "example: tapetune launch --nproc 8 -- train llama2-7b-8k/tape model=/models/Llama-2-7b-hf data=rp.tokens");
  verb->callback([options] {
    const int code = launch(options->ranks, options->command);
    if (code != ok) std::exit(code);
  });
}

}  // namespace tapetune::cli
