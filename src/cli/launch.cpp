#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>
#include <thread>

#include "cli/exit_code.h"
#include "cli/run_distributed.h"
#include "cli/usage.h"
#include "cli/verbs.h"
#include "core/cores.h"
#include "core/error.h"
#include "core/log.h"
#include "core/moment.h"
#include "core/output.h"
#include "core/signals.h"
#include "distributed/rendezvous.h"

namespace tapetune::cli {

namespace {

struct Child {
  pid_t process = 0;
  bool ended = false;
  int status = 0;
  std::string heartbeat = {};                               // the last one seen
  std::chrono::steady_clock::time_point heartbeat_at = {};  // when it was another than before
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

// What a rank is started with, made before fork(): afterwards a process with several threads may only call what a
// signal handler may.
class RankProgram {
 public:
  RankProgram(std::filesystem::path program, const std::vector<std::string>& command, int ranks, int port)
      : program_(std::move(program)), words_{"tapetune"} {
    if (quiet()) words_.emplace_back("-q");
    words_.insert(words_.end(), command.begin(), command.end());
    for (char** each = environ; *each != nullptr; ++each) environment_.emplace_back(*each);
    set("WORLD_SIZE", std::to_string(ranks));
    set("MASTER_ADDR", "127.0.0.1");
    set("MASTER_PORT", std::to_string(port));
    set("TORCHELASTIC_USE_AGENT_STORE", "True");
    set("TORCHELASTIC_RESTART_COUNT", attempt);
    if (std::getenv("OMP_NUM_THREADS") == nullptr) {
      set("OMP_NUM_THREADS", std::to_string(std::max(1, available_cores() / ranks)));
    }
  }

  // Starts one; an error of fork() fails.
  pid_t start(int rank) {
    set("RANK", std::to_string(rank));
    set("LOCAL_RANK", std::to_string(rank));
    const std::vector<char*> words = pointers(words_), environment = pointers(environment_);
    at_moment("fork");
    // A signal that comes before the rank catches it would end it or be lost; so it waits until then.
    const BlockSignals until_it_catches_them;
    const pid_t parent = ::getpid(), child = ::fork();
    if (child < 0) {
      fail("launch", "rank {} could not be started: {}; lower --nproc, or raise the limits on processes and memory.",
           rank, errno_text(errno));
    }
    if (child != 0) return child;
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);  // a rank does not outlive the launcher
    if (::getppid() != parent) ::_exit(bad_input);
    ::setpgid(0, 0);  // Ctrl-C reaches the launcher alone, which passes it on: a second one would end a rank at once
    at_moment("rank");
    ::execve(program_.c_str(), words.data(), environment.data());
    write_error("error: [launch] the program could not be started as a rank; was its file removed?\n");
    ::_exit(bad_input);
  }

  static constexpr const char* attempt = "0";

 private:
  void set(const std::string& name, const std::string& value) {
    std::erase_if(environment_, [&](const std::string& entry) { return entry.starts_with(name + "="); });
    environment_.push_back(name + "=" + value);
  }
  static std::vector<char*> pointers(std::vector<std::string>& texts) {
    std::vector<char*> all;
    all.reserve(texts.size() + 1);
    for (std::string& text : texts) all.push_back(text.data());
    all.push_back(nullptr);
    return all;
  }
  std::filesystem::path program_;
  std::vector<std::string> words_, environment_;
};

void signal_all(const std::vector<Child>& children, int number) {
  for (const Child& child : children) {
    if (child.process > 0 && !child.ended) ::kill(child.process, number);
  }
}

std::string signal_text(int status) {
  return fmt::format("signal {} ({})", WTERMSIG(status), ::strsignal(WTERMSIG(status)));
}

bool failed(int status) { return status != 0 && !(WIFEXITED(status) && WEXITSTATUS(status) == resumable); }

// The ranks of one launch, until all have ended.
class Waiting {
 public:
  Waiting(std::vector<Child>& children, const Store& store)
      : children_(children), store_(of_attempt(store, RankProgram::attempt)) {}

  // When one fails the others notice by themselves, and rank 0 says what it was; those who do not respond are ended.
  // After an interruption nobody is: rank 0 may save for longer than any limit.
  void run() {
    for (std::size_t left = children_.size(); left > 0;) {
      for (std::size_t r = 0; r < children_.size(); ++r) {
        Child& child = children_[r];
        if (child.ended || ::waitpid(child.process, &child.status, WNOHANG) == 0) continue;
        child.ended = true;
        --left;
        if (failed(child.status)) tell_failure(static_cast<int>(r));
      }
      if (interrupted() && !std::exchange(passed_on_, true)) signal_all(children_, SIGTERM);
      if (interrupt_count() > 1) {  // "press Ctrl-C again to stop now"
        signal_all(children_, SIGKILL);
        std::signal(SIGINT, SIG_DFL);
        std::raise(SIGINT);
      }
      if (first_failure_) end_silent_ranks();
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  }

 private:
  using Clock = std::chrono::steady_clock;

  // Nobody else knows of a rank that was killed, or ended before the rendezvous.
  void tell_failure(int rank) {
    const int status = children_[static_cast<std::size_t>(rank)].status;
    if (!first_failure_) first_failure_ = Clock::now();
    const std::string why = WIFSIGNALED(status)
                                ? fmt::format(
                                      "it was killed by {}; check the memory of this machine, then rerun the "
                                      "same command to resume from the last checkpoint.",
                                      signal_text(status))
                                : fmt::format("it ended with exit code {}; see its message.", WEXITSTATUS(status));
    try {
      if (!store_->check({failed_key(rank)})) store_->set(failed_key(rank), why);
    } catch (const std::exception&) {  // then its heartbeat tells them
    }
  }

  // A stopped process ends by nothing but SIGKILL; one that sends heartbeats may be saving, and ends by itself.
  void end_silent_ranks() {
    constexpr std::chrono::seconds look_every{1}, grace{15};  // longer than rank 0 takes to find out
    const Clock::time_point now = Clock::now();
    if (now - looked_ < look_every) return;
    looked_ = now;
    for (std::size_t r = 0; r < children_.size(); ++r) {
      Child& child = children_[r];
      if (child.ended) continue;
      std::string heartbeat;
      try {
        const std::string key = heartbeat_key(static_cast<int>(r));
        if (store_->check({key})) heartbeat = text_of(store_->get(key));
      } catch (const std::exception&) {  // as one without a heartbeat
      }
      if (std::exchange(child.heartbeat, heartbeat) != heartbeat) child.heartbeat_at = now;
      if (now - std::max(child.heartbeat_at, *first_failure_) > grace) ::kill(child.process, SIGKILL);
    }
  }

  std::vector<Child>& children_;
  Store store_;
  bool passed_on_ = false;
  std::optional<Clock::time_point> first_failure_;
  Clock::time_point looked_;
};

int launch(int ranks, const std::vector<std::string>& command) {
  const auto store = open_rendezvous();
  RankProgram program(own_program(), command, ranks, store->getPort());
  std::vector<Child> children(static_cast<std::size_t>(ranks));
  count_interrupts();
  try {
    for (int r = 0; r < ranks; ++r) {
      check_interrupted();
      children[static_cast<std::size_t>(r)].process = program.start(r);
    }
  } catch (...) {
    signal_all(children, SIGKILL);  // nothing has begun without the others
    throw;
  }
  Waiting(children, store).run();
  const int first = children.front().status;
  if (WIFSIGNALED(first)) {
    fail("launch", "rank 0 was killed by {}; rerun the same command to resume from the last checkpoint.",
         signal_text(first));
  }
  if (first != 0) return WEXITSTATUS(first);
  for (std::size_t r = 1; r < children.size(); ++r) {
    const int status = children[r].status;
    if (WIFSIGNALED(status)) fail("launch", "rank {} was killed by {} after rank 0 had ended.", r, signal_text(status));
    if (status != 0) return WEXITSTATUS(status);
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
