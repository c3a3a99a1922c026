// Signals, terminals and pipes that are gone, and files that shrink: what was computed is saved, and one line says it.
#include <fcntl.h>
#include <pty.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "catch.h"
#include "core/file.h"
#include "support.h"

namespace signals_test {

using namespace tapetune;
using namespace tapetune::test;
namespace fs = std::filesystem;

namespace {

// A recipe that trains for as long as a test lets it.
struct LongRun {
  LongRun() {
    tiny_tokens(model, data(), 20'000);
    write_file(model.folder / "recipe.yaml",
               fmt::format("model: {}\ndata: {}\nrun: {}\ncontext: 16\nadapter: {{method: lora, rank: 2}}\n"
                           "steps: 1000000\nbatch: 4\noptimizer: {{lr: 1.0e-3}}\nsave_every: 0\ndtype: f32\n",
                           model.path(), data().string(), folder().string()));
  }
  fs::path data() const { return model.folder / "data.tokens"; }
  fs::path folder() const { return model.folder / "run"; }
  fs::path err() const { return model.folder / "err"; }
  std::vector<std::string> words() const {
    return {"train", (model.folder / "recipe.yaml").string(), "--threads", "1"};
  }
  std::vector<std::string> ranked() const {
    return {"launch", "--nproc", "2", "--", "train", (model.folder / "recipe.yaml").string(), "--timeout", "60"};
  }
  // Which step a new process would resume from.
  std::string saved() const {
    std::string last;
    std::error_code none;
    for (const auto& entry : fs::directory_iterator(folder() / "checkpoints", none)) {
      if (entry.path().filename().string().starts_with("step-"))
        last = std::max(last, entry.path().filename().string());
    }
    return last;
  }
  TinyModel model;
};

void stop_at(const char* moment) {
  ::setenv("TAPETUNE_STOP_AT", moment, 1);
  std::signal(SIGHUP, SIG_DFL);  // the tests themselves may run under nohup
}

int status_of(pid_t process) {
  int status = 0;
  ::waitpid(process, &status, 0);
  return status;
}

int exit_of(pid_t process) {
  const int status = status_of(process);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace

TEST_CASE("signals: SIGHUP saves as SIGTERM does, unless it was ignored at the start") {
  const LongRun hung_up;
  const pid_t first = start(hung_up.words(), [&] {
    stop_at("step:5");
    redirect(hung_up.err(), stderr);
  });
  REQUIRE(comes_true([&] { return is_stopped(first); }));
  ::kill(first, SIGHUP);
  ::kill(first, SIGCONT);
  CHECK(exit_of(first) == 3);
  CHECK(hung_up.saved() == "step-00000005");
  CHECK_THAT(read_file(hung_up.err()), Contains("interrupted; saved at step 5 of 1000000"));

  const LongRun ignoring;
  std::vector<std::string> words = ignoring.words();
  words.emplace_back("steps=8");
  const pid_t second = start(words, [&] {
    stop_at("step:5");
    std::signal(SIGHUP, SIG_IGN);
    redirect("/dev/null", stderr);
    redirect("/dev/null", stdout);
  });
  REQUIRE(comes_true([&] { return is_stopped(second); }));
  ::kill(second, SIGHUP);
  ::kill(second, SIGCONT);
  CHECK(exit_of(second) == 0);
  CHECK(ignoring.saved() == "step-00000008");
}

TEST_CASE("signals: a terminal that is closed saves the run, alone and on several ranks") {
  for (const bool ranks : {false, true}) {
    const LongRun closed;
    int terminal = -1;
    const pid_t child = ::forkpty(&terminal, nullptr, nullptr, nullptr);
    if (child < 0) {
      fmt::print("SKIPPED: no pseudoterminal can be opened\n");
      return;
    }
    if (child == 0) {
      exec_binary(ranks ? closed.ranked() : closed.words(), [] {
        stop_at("step:5");
        ::setenv("OMP_NUM_THREADS", "1", 1);
      });
    }
    const auto workers = [&] { return ranks ? children_of(child) : std::vector<pid_t>{child}; };
    REQUIRE(comes_true([&] {
      const auto all = workers();
      return all.size() == (ranks ? 2 : 1) && std::all_of(all.begin(), all.end(), is_stopped);
    }));
    const std::vector<pid_t> stopped = workers();
    ::close(terminal);  // the kernel sends SIGHUP and SIGCONT to who leads the session
    if (ranks) {
      for (const pid_t rank : stopped) REQUIRE(comes_true([&] { return is_pending(rank, SIGTERM); }));
      for (const pid_t rank : stopped) ::kill(rank, SIGCONT);
    }
    CHECK(exit_of(child) == 3);
    // Ranks agree to stop while they compute the next step.
    CHECK(closed.saved() == (ranks ? "step-00000006" : "step-00000005"));
  }
}

TEST_CASE("signals: a stderr that nobody reads any more stops neither training nor saving") {
  for (const bool ranks : {false, true}) {
    const LongRun unread;
    int ends[2];
    REQUIRE(::pipe2(ends, O_CLOEXEC) == 0);
    const pid_t child = start(ranks ? unread.ranked() : unread.words(), [&] {
      stop_at("step:5");
      ::dup2(ends[1], STDERR_FILENO);
      std::signal(SIGPIPE, SIG_DFL);
    });
    ::close(ends[0]);  // as when Ctrl-C also ends the tee behind a pipe
    ::close(ends[1]);
    const auto workers = [&] { return ranks ? children_of(child) : std::vector<pid_t>{child}; };
    REQUIRE(comes_true([&] {
      const auto all = workers();
      return all.size() == (ranks ? 2 : 1) && std::all_of(all.begin(), all.end(), is_stopped);
    }));
    const std::vector<pid_t> stopped = workers();
    ::kill(child, SIGINT);
    for (const pid_t worker : stopped) {
      REQUIRE(comes_true([&] { return is_pending(worker, ranks ? SIGTERM : SIGINT); }));
    }
    for (const pid_t worker : stopped) ::kill(worker, SIGCONT);
    CHECK(exit_of(child) == 3);
    CHECK(unread.saved() == (ranks ? "step-00000006" : "step-00000005"));
  }
}

TEST_CASE("signals: more of SIGTERM and SIGHUP do not end a process that saves") {
  const LongRun saving;
  const pid_t child = start(saving.words(), [&] {
    stop_at("saving:2");
    redirect(saving.err(), stderr);
  });
  REQUIRE(comes_true([&] { return fs::exists(saving.folder() / "metrics.jsonl"); }));
  ::kill(child, SIGTERM);
  REQUIRE(comes_true([&] { return is_stopped(child); }));
  ::kill(child, SIGTERM);
  ::kill(child, SIGHUP);
  ::kill(child, SIGCONT);
  CHECK(exit_of(child) == 3);
  CHECK(saving.saved().starts_with("step-"));
  CHECK_THAT(read_file(saving.err()), Contains("interrupted; saved at step"));
}

TEST_CASE("signals: no file takes the number of a closed standard stream") {
  const LongRun closed;
  const pid_t child = start(closed.words(), [] {
    stop_at("step:1");
    for (const int stream : {0, 1, 2}) ::close(stream);
  });
  REQUIRE(comes_true([&] { return is_stopped(child); }));
  for (const int stream : {0, 1, 2}) {
    CHECK(fs::read_symlink(fmt::format("/proc/{}/fd/{}", child, stream)) == "/dev/null");
  }
  ::kill(child, SIGTERM);
  ::kill(child, SIGCONT);
  CHECK(exit_of(child) == 3);
  CHECK(closed.saved() == "step-00000001");
}

TEST_CASE("signals: results that nobody reads end the program as they end others") {
  const TinyModel model;
  const auto status_with = [&](void (*handler)(int)) {
    int ends[2];
    REQUIRE(::pipe2(ends, O_CLOEXEC) == 0);
    const pid_t child = start({"inspect", model.path()}, [&] {
      ::dup2(ends[1], STDOUT_FILENO);
      redirect(model.folder / "err", stderr);
      std::signal(SIGPIPE, handler);
    });
    ::close(ends[0]);
    ::close(ends[1]);
    return status_of(child);
  };
  const int status = status_with(SIG_DFL);
  CHECK((WIFSIGNALED(status) && WTERMSIG(status) == SIGPIPE));
  CHECK(WEXITSTATUS(status_with(SIG_IGN)) == 1);
  CHECK_THAT(read_file(model.folder / "err"), Contains("[output] standard output cannot be written: Broken pipe"));
}

namespace {

// Starts a command, stops it at a moment, cuts a file to nothing, and goes on.
RunResult shrunk(const LongRun& run, const std::vector<std::string>& words, const char* moment, const fs::path& file) {
  const pid_t child = start(words, [&] {
    stop_at(moment);
    redirect(run.model.folder / "out-text", stdout);
    redirect(run.err(), stderr);
  });
  REQUIRE(comes_true([&] { return is_stopped(child); }));
  fs::resize_file(file, 0);
  ::kill(child, SIGCONT);
  const int code = exit_of(child);
  return {code, "", read_file(run.err())};
}

}  // namespace

TEST_CASE("mapped files: one that shrinks ends the program with one line that names it") {
  const auto told = [](const RunResult& result, const fs::path& file) {
    INFO(result.err);
    CHECK(result.exit == 1);
    CHECK(result.err ==
          fmt::format("error: [file] {}: shrank while it was in use; restore it and rerun the same command.\n",
                      file.string()));
  };
  {
    const LongRun run;
    told(shrunk(run, run.words(), "step:2", run.data()), run.data());
    CHECK(run.saved().empty());
  }
  const LongRun trained;
  std::vector<std::string> words = trained.words();
  words.emplace_back("steps=1");
  REQUIRE(run(words).exit == 0);
  const std::string model = trained.model.path(), out = trained.model.out();
  const fs::path weights = trained.model / "model.safetensors";
  const std::string whole = read_file(weights);
  const std::vector<std::vector<std::string>> commands{
      {"generate", model, "--prompt", "ab", "--max-new-tokens", "3"},
      {"eval", "perplexity", model, "--data", trained.data().string(), "--context", "16"},
      {"convert", model, "--out", out},
      {"merge", trained.folder().string(), "--out", out}};
  for (const std::vector<std::string>& command : commands) {
    INFO(command[0]);
    write_file(weights, whole);
    told(shrunk(trained, command, "mapped:1", weights), weights);
    CHECK_FALSE(fs::exists(out));
  }
}

TEST_CASE("mapped files: writing from one that shrank names it") {
  const TempFolder folder;
  const fs::path source = folder / "source";
  write_file(source, std::string(100'000, 'x'));
  const auto map = MappedFile::open(source);
  fs::resize_file(source, 5000);
  OutputFile out(folder / "copy");
  CHECK(error_of([&] { out.write(map->bytes()); }) ==
        fmt::format("[file] {}: shrank while it was in use; restore it and rerun the same command.", source.string()));
}

TEST_CASE("mapped files: a SIGBUS that is not of a file keeps its meaning") {
  const LongRun run;
  const pid_t child = start(run.words(), [] {
    stop_at("mapped:1");
    ::setenv("ASAN_OPTIONS", "handle_sigbus=0", 1);  // in the sanitizer's build its own handler is what SIGBUS means
    const rlimit none{0, 0};
    ::setrlimit(RLIMIT_CORE, &none);
  });
  REQUIRE(comes_true([&] { return is_stopped(child); }));
  ::kill(child, SIGBUS);
  ::kill(child, SIGCONT);
  const int status = status_of(child);
  CHECK((WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS));
}

}  // namespace signals_test
