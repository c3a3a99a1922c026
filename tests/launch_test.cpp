// Ranks that launch starts: who can reach them, what forged words do, and interruptions at any moment.
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <fstream>
#include <set>
#include <sstream>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "catch.h"
#include "core/error.h"
#include "distributed/data_parallel.h"
#include "distributed/failures.h"
#include "distributed/world.h"
#include "support.h"

namespace launch_test {

using namespace tapetune;
using namespace tapetune::test;
namespace fs = std::filesystem;
using std::chrono::seconds;

namespace {

struct Launched {
  Launched() {
    tiny_tokens(model, model.folder / "data.tokens", 4000);
    write_file(model.folder / "recipe.yaml",
               fmt::format("model: {}\ndata: {}\nrun: {}\ncontext: 16\nadapter: {{method: lora, rank: 2}}\n"
                           "steps: 1000000\nbatch: 4\noptimizer: {{lr: 1.0e-3}}\nsave_every: 0\ndtype: f32\n",
                           model.path(), (model.folder / "data.tokens").string(), (model.folder / "run").string()));
  }
  // Two ranks that stop themselves at a moment.
  void start_stopping(const std::string& moment) {
    launcher = start(
        {"launch", "--nproc", "2", "--", "train", (model.folder / "recipe.yaml").string(), "--timeout", "60", "-q"},
        [&] {
          ::setenv("TAPETUNE_STOP_AT", moment.c_str(), 1);
          ::setenv("OMP_NUM_THREADS", "1", 1);
          redirect(model.folder / "err", stderr);
          redirect("/dev/null", stdout);
        });
  }
  std::vector<pid_t> stopped_ranks() const {
    std::vector<pid_t> ranks;
    REQUIRE(comes_true([&] {
      ranks = children_of(launcher);
      return ranks.size() == 2 && std::all_of(ranks.begin(), ranks.end(), is_stopped);
    }));
    return ranks;
  }
  int end() {
    int status = 0;
    ::waitpid(launcher, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  std::string said() const { return read_file(model.folder / "err"); }
  bool saved(const std::string& step) const { return fs::exists(model.folder / "run" / "checkpoints" / step); }
  TinyModel model;
  pid_t launcher = 0;
};

// The local addresses, in hexadecimal, at which a process listens.
std::vector<std::string> listening(pid_t process) {
  std::set<std::string> sockets;
  for (const auto& entry : fs::directory_iterator(fmt::format("/proc/{}/fd", process))) {
    std::error_code status;
    sockets.insert(fs::read_symlink(entry.path(), status).string());
  }
  std::vector<std::string> found;
  for (const char* table : {"tcp", "tcp6"}) {
    std::ifstream lines(fmt::format("/proc/{}/net/{}", process, table));
    for (std::string line; std::getline(lines, line);) {
      std::istringstream words(line);
      std::string number, local, remote, state, skipped, inode;
      words >> number >> local >> remote >> state;
      for (int i = 0; i < 5; ++i) words >> skipped;
      words >> inode;
      if (state == "0A" && sockets.contains("socket:[" + inode + "]"))
        found.push_back(local.substr(0, local.find(':')));
    }
  }
  return found;
}

bool is_loopback(const std::string& address) {
  return address == "0100007F" || address == "00000000000000000000000001000000" ||
         address == "0000000000000000FFFF00000100007F";
}

}  // namespace

TEST_CASE("launch: the store and the ranks listen on the loopback interface only") {
  Launched run;
  run.start_stopping("step:1");
  const std::vector<pid_t> ranks = run.stopped_ranks();
  CHECK(listening(run.launcher).size() == 1);
  for (const pid_t process : {run.launcher, ranks[0], ranks[1]}) {
    for (const std::string& address : listening(process)) CHECK(is_loopback(address));
  }
  ::kill(run.launcher, SIGTERM);
  for (const pid_t rank : ranks) ::kill(rank, SIGCONT);
  CHECK(run.end() == 3);
}

namespace {

// Two ranks that are interrupted while they are stopped at a moment. `saved`: what must be there then; empty: a
// checkpoint if and only if rank 0 says so.
void interrupt_at(const std::string& moment, const std::string& saved) {
  INFO(moment);
  Launched run;
  run.start_stopping(moment);
  if (moment.starts_with("fork") || moment.starts_with("start")) {  // which the launcher reaches first
    REQUIRE(comes_true([&] { return is_stopped(run.launcher); }));
    if (moment.starts_with("fork")) ::kill(run.launcher, SIGTERM);
    ::kill(run.launcher, SIGCONT);
  }
  std::jthread waking;
  if (!moment.starts_with("fork")) {
    std::vector<pid_t> ranks;
    REQUIRE(comes_true([&] {
      ranks = children_of(run.launcher);
      return ranks.size() == 2 && std::any_of(ranks.begin(), ranks.end(), is_stopped);
    }));
    const pid_t first = is_stopped(ranks[0]) ? ranks[0] : ranks[1];
    ::kill(run.launcher, SIGTERM);
    REQUIRE(comes_true([&] { return is_pending(first, SIGTERM); }));
    waking = std::jthread([ranks](const std::stop_token& over) {  // the other may stop later
      while (!over.stop_requested()) {
        for (const pid_t rank : ranks) {
          if (is_stopped(rank)) ::kill(rank, SIGCONT);
        }
        ::usleep(10'000);
      }
    });
  }
  CHECK(run.end() == 3);
  INFO(run.said());
  const std::vector<std::string> lines = lines_of(run.said());
  REQUIRE(lines.size() == 1);
  const bool says_saved = lines[0].starts_with("interrupted; saved at step ");
  CHECK((says_saved || lines[0] == "interrupted; no partial files were left"));
  if (!saved.empty()) CHECK(says_saved);
  CHECK(run.saved(saved.empty() ? "step-00000001" : saved) == says_saved);
}

}  // namespace

TEST_CASE("launch: interrupted before its ranks have met, it ends with exit 3 and one line") {
  for (const char* moment : {"fork:2", "rank:1", "start:1", "meet:1"}) interrupt_at(moment, "");
}

TEST_CASE("launch: interrupted when its ranks have met, it ends with exit 3 and one line, and loses no step") {
  interrupt_at("met:1", "");
  interrupt_at("mapped:1", "");
  interrupt_at("resume:1", "step-00000001");
  interrupt_at("step:3", "step-00000004");
}

TEST_CASE("launch: a rank that is killed before all have met is named at once") {
  Launched run;
  run.start_stopping("meet:1");
  const std::vector<pid_t> ranks = run.stopped_ranks();
  ::kill(ranks[1], SIGKILL);
  ::kill(ranks[0], SIGCONT);
  CHECK(run.end() == 1);
  CHECK_THAT(run.said(), Contains("error: [ranks] rank 1 failed: it was killed by signal 9 (Killed)"));
  CHECK(lines_of(run.said()).size() == 1);
}

TEST_CASE("launch: a second Ctrl-C ends the ranks at once") {
  Launched run;
  run.start_stopping("step:3");
  const std::vector<pid_t> ranks = run.stopped_ranks();
  ::kill(run.launcher, SIGINT);
  REQUIRE(comes_true([&] { return is_pending(ranks[0], SIGTERM); }));
  ::kill(run.launcher, SIGINT);
  CHECK(run.end() == 128 + SIGINT);
  for (const pid_t rank : ranks) CHECK(comes_true([&] { return ::kill(rank, 0) != 0; }));
}

#ifdef __x86_64__
TEST_CASE("launch: a rank that cannot be started ends those that were, and nothing else") {
  const TinyModel model;
  const RunResult result = run({"launch", "--nproc", "2", "--", "train", "no-such-recipe"}, [] {
    // fork() fails; threads, which clone3 starts, do not.
    sock_filter filter[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                            BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone, 0, 1),
                            BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EAGAIN),
                            BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
    const sock_fprog program{4, filter};
    ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
  });
  INFO(result.err);
  CHECK(result.exit == 1);
  CHECK_THAT(result.err, Contains("error: [launch] rank 0 could not be started: Resource temporarily unavailable"));
}
#endif

namespace {

// Two ranks as threads, and somebody else who has found their store.
struct Pair {
  Pair() {
    static std::atomic<int> pairs = 0;
    first.ranks = second.ranks = 2;
    second.rank = 1;
    first.port = second.port = 30'000 + (::getpid() * 7 + pairs++) % 2000;
    std::jthread other([&] { rank_1 = std::make_unique<World>(second, seconds(3)); });
    rank_0 = std::make_unique<World>(first, seconds(3));
    other.join();
    c10d::TCPStoreOptions options;
    options.port = static_cast<std::uint16_t>(first.port);
    options.waitWorkers = false;
    stranger = of_attempt(c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options), first.attempt);
  }
  void forge(const std::string& key, const std::string& value) const { stranger->set(key, value); }

  RankInfo first, second;
  std::unique_ptr<World> rank_0, rank_1;
  Store stranger;
};

const std::string escape = "\033]0;owned\007\033[31m";

// What rank 0 tells when rank 1 does not answer.
std::string told_by_rank_0(World& world) {
  try {
    world.gather("");
  } catch (const RankLost& error) {
    return world.diagnose(error.what());
  }
  return "nothing was lost";
}

}  // namespace

TEST_CASE("ranks: a heartbeat that is not a number is an error with the rank's name") {
  for (const std::string& heartbeat :
       {escape, std::string("7"), std::string("7 x"), std::string("99999999999999999999 1"), std::string(),
        std::string(" 1"), std::string("1 2 3")}) {
    const Store store = c10::make_intrusive<c10d::HashStore>();
    store->set("beat/0", "7 2");
    store->set("beat/1", heartbeat);
    const std::string error = error_of([&] { read_heartbeats(store, {"a, process 1", "b, process 2"}); });
    CHECK(error.starts_with("[ranks] rank 1 (b, process 2) sent a heartbeat that is not a number: "));
    CHECK(std::none_of(error.begin(), error.end(), [](char c) { return c < ' '; }));
  }
  Pair pair;
  pair.rank_1.reset();  // whose heartbeat would write over it
  pair.forge("beat/1", escape);
  CHECK_THAT(told_by_rank_0(*pair.rank_0), Contains("sent a heartbeat that is not a number: \\u001b]0;"));
}

TEST_CASE(
    "ranks: a rank that is lost while gradients are exchanged is named, and an error about gloo is no lost rank") {
  Pair pair;
  Group gradients;
  {
    std::jthread other([&] { pair.rank_1->group("gradients"); });
    gradients = pair.rank_0->group("gradients");
  }
  CHECK_THROWS_AS(gradients.guard([] { fail("data", "gloo.tokens: no such file."); }), Error);
  CHECK_FALSE(gradients.lost());
  pair.rank_1.reset();
  const at::Tensor weight = at::ones({4}).requires_grad_(true);
  const std::vector<Parameter> parameters{{"model.layers.0.x", weight, ""}};
  DataParallel exchange(parameters, gradients);
  std::string told;
  try {
    exchange.backward((weight * weight).sum());
  } catch (const RankLost& error) {
    told = pair.rank_0->diagnose(error.what());
  }
  CHECK(told.starts_with("[ranks] rank 1 ("));
  CHECK_THAT(told, Contains("stopped responding"));
}

TEST_CASE("ranks: a forged failure is one printable line") {
  Pair pair;
  pair.forge("failed/1", escape + "\nerror: forged " + std::string(1'000'000, 'x'));
  const std::string told = told_by_rank_0(*pair.rank_0);
  CHECK(told.starts_with("[ranks] rank 1 ("));
  CHECK_THAT(told, Contains("\\u001b]0;owned\\u0007"));
  CHECK(std::none_of(told.begin(), told.end(), [](char c) { return c < ' '; }));
  CHECK(told.size() < 4000);
}

TEST_CASE("ranks: what another rank says is checked, and the rank is named") {
  {
    Pair pair;
    pair.forge("group/0/1", "1e9");
    CHECK(error_of([&] { pair.rank_0->group("gradients"); }) ==
          "[ranks] rank 1 has the group number 1e9, which is none; check that no other program uses the ranks' port.");
  }
  for (const std::string& forged : {escape, std::string("{}"), std::string("[1, 2]"), std::string("[\"a\"]")}) {
    Pair pair;
    pair.forge("announce/1", forged);
    const std::string error = error_of([&] { pair.rank_1->all_gather("x"); });
    CHECK(error.starts_with("[ranks] rank 0 sent "));
    CHECK(std::none_of(error.begin(), error.end(), [](char c) { return c < ' '; }));
  }
  Pair pair;
  pair.forge("say/0/1", escape + "lr: 1");
  std::jthread other([&] {
    try {
      pair.rank_1->require_same("a recipe", "lr: 2", "start all ranks with the same command");
    } catch (const std::exception&) {  // what it says, rank 0 says
    }
  });
  const std::string error = error_of([&] {
    // The real word of rank 1 comes after the forged one, or before it; both differ.
    pair.rank_0->require_same("a recipe", "lr: 3", "start all ranks with the same command");
  });
  CHECK(error.starts_with("[launch] rank 1 ("));
  CHECK_THAT(error, Contains("has a recipe different from rank 0's"));
  CHECK(std::none_of(error.begin(), error.end(), [](char c) { return c < ' '; }));
}

TEST_CASE("ranks: those that were interrupted stay until rank 0 has saved") {
  Pair pair;
  std::atomic<bool> saved = false, saved_before_leaving = false;
  std::jthread other([&] {
    pair.rank_1->interrupt();
    pair.rank_1->shutdown(seconds(10));
    saved_before_leaving = saved.load();
  });
  std::this_thread::sleep_for(seconds(1));  // it saves
  saved = true;
  pair.rank_0->interrupt();
  pair.rank_0->shutdown(seconds(10));
  other.join();
  CHECK(saved_before_leaving);
}

TEST_CASE("ranks: one that is interrupted alone ends those that wait for it") {
  Pair pair;
  pair.rank_1->interrupt();
  CHECK_THROWS_AS(pair.rank_0->gather(""), Interrupted);
}

TEST_CASE("ranks: rank 0 listens at MASTER_ADDR only") {
  Pair pair;
  for (const std::string& address : listening(::getpid())) CHECK(is_loopback(address));
  CHECK(error_of([&] {
          RankInfo info = pair.first;
          World(info, seconds(3));
        }) ==
        fmt::format("[launch] port {} of this machine cannot be opened: Address already in use; set MASTER_PORT to "
                    "a free port.",
                    pair.first.port));
}

}  // namespace launch_test
