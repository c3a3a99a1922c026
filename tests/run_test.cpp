// Runs in bad company: full and read-only disks, damaged and missing data, recipes with mistakes. What was saved stays,
// and once the trouble is over the same command ends as if it had never been.
#include <fcntl.h>
#include <linux/capability.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <random>

#include "catch.h"
#include "checkpoint/writer.h"
#include "core/json.h"
#include "data/token_file.h"
#include "support.h"

namespace run_test {

using namespace tapetune;
using namespace tapetune::test;
namespace fs = std::filesystem;

namespace {

// A tiny model, a token file, and a recipe that trains all of it with checkpoints of about 400 KB.
struct Setup {
  explicit Setup(const std::string& adapter = "{method: full}") {
    tiny_tokens(model, data(), 4000);
    write_file(recipe(), fmt::format("model: {}\ndata: {}\nrun: {}\ncontext: 16\nadapter: {}\nsteps: 12\nbatch: 8\n"
                                     "micro_batch: 8\noptimizer: {{lr: 1.0e-3}}\nsave_every: 3\ndtype: f32\n",
                                     model.path(), data(), folder("run"), adapter));
  }
  std::string data() const { return (model.folder / "data.tokens").string(); }
  std::string recipe() const { return (model.folder / "recipe.yaml").string(); }
  std::string folder(const std::string& name) const { return (model.folder / name).string(); }
  RunResult train(std::vector<std::string> words = {}, const std::function<void()>& before = {}) const {
    words.insert(words.begin(), {"train", recipe(), "--threads", "1"});
    return run(words, before);
  }
  TinyModel model;
};

void same_result(const fs::path& run, const fs::path& undisturbed) {
  CHECK(untimed_metrics(run) == untimed_metrics(undisturbed));
  CHECK(contents(run / "adapter") == contents(undisturbed / "adapter"));
}

template <typename Matcher>
void refused(const RunResult& result, const Matcher& matcher) {
  CHECK(result.exit == 1);
  CHECK(result.out.empty());
  CHECK_THAT(result.err, matcher);
  CHECK(lines_of(result.err).size() == 1);
  CHECK(result.err.rfind("error: [", 0) == 0);
}

// A disk in memory that only those see who enter its namespace; for the test it is under path().
class SmallDisk {
 public:
  explicit SmallDisk(fs::path mount) : mount_(std::move(mount)) {
    fs::create_directory(mount_);
    int ready[2];
    if (::pipe(ready) != 0) return;
    holder_ = ::fork();
    if (holder_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      const bool made = ::unshare(CLONE_NEWNS) == 0 &&
                        ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
                        ::mount("tmpfs", mount_.c_str(), "tmpfs", 0, "size=4m") == 0;
      if (::write(ready[1], made ? "y" : "n", 1) != 1 || !made) ::_exit(1);
      while (true) ::pause();
    }
    ::close(ready[1]);
    char answer = 'n';
    there_ = ::read(ready[0], &answer, 1) == 1 && answer == 'y';
    ::close(ready[0]);
    if (!there_) fmt::print("SKIPPED: mounting a small disk needs root\n");
  }
  ~SmallDisk() {
    ::kill(holder_, SIGKILL);
    ::waitpid(holder_, nullptr, 0);
  }
  SmallDisk(const SmallDisk&) = delete;
  SmallDisk& operator=(const SmallDisk&) = delete;

  bool there() const { return there_; }
  fs::path path() const { return fmt::format("/proc/{}/root{}", holder_, mount_.string()); }

  // For a child of the test: sees the disk from now on. setns leaves a chroot, in which the tests may run.
  void enter() const {
    const int space = ::open(fmt::format("/proc/{}/ns/mnt", holder_).c_str(), O_RDONLY | O_CLOEXEC);
    const int root = ::open(fmt::format("/proc/{}/root", holder_).c_str(), O_PATH | O_CLOEXEC);
    if (space < 0 || root < 0 || ::setns(space, CLONE_NEWNS) != 0 || ::fchdir(root) != 0 || ::chroot(".") != 0) {
      ::_exit(99);
    }
  }
  void enter_read_only() const {
    enter();
    if (::mount("none", mount_.c_str(), nullptr, MS_REMOUNT | MS_RDONLY, nullptr) != 0) ::_exit(99);
  }
  // Takes all the room but this much.
  void fill(std::uintmax_t but) const {
    const std::uintmax_t room = fs::space(path()).available;
    write_file(path() / "filler", std::string(room > but ? room - but : 0, 'x'));
  }
  void empty() const { fs::remove(path() / "filler"); }

 private:
  fs::path mount_;
  pid_t holder_ = -1;
  bool there_ = false;
};

// Permissions bind root too in a program that is started after this.
void obey_permissions() {
  ::prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE);
  ::prctl(PR_CAPBSET_DROP, CAP_DAC_READ_SEARCH);
}

}  // namespace

TEST_CASE("training: a disk that is full at a checkpoint") {
  const Setup setup;
  REQUIRE(setup.train({"run=" + setup.folder("whole")}).exit == 0);
  const SmallDisk disk(setup.model.folder / "disk");
  if (!disk.there()) return;
  const std::string words = "run=" + (setup.model.folder / "disk/run").string();
  const fs::path run_ = disk.path() / "run";
  const auto train = [&](const std::string& steps) { return setup.train({words, steps}, [&] { disk.enter(); }); };
  REQUIRE(train("steps=6").exit == 0);
  const auto saved = contents(run_ / "checkpoints"), adapter = contents(run_ / "adapter");

  // Room for the metrics, and for none or some of a checkpoint's files: the run goes on and says so, and the last
  // checkpoint, which cannot be left out, ends it.
  for (const auto& [room, said] :
       {std::pair(60'000, "free some space"), std::pair(250'000, "No space left on device")}) {
    INFO(room);
    disk.fill(room);
    const RunResult full = train("steps=12");
    CHECK(full.exit == 1);
    CHECK(full.out.empty());
    const auto lines = lines_of(full.err);
    REQUIRE(lines.size() == 4);
    CHECK_THAT(lines[0], Contains("checkpoints and adapter will need") && Contains("but the disk has"));
    CHECK(lines[1] == "note: resuming at step 6 of 12");
    CHECK_THAT(lines[2], Contains("step 9: [") && Contains(said) &&
                             Contains("Training continues; the last checkpoint is of step 6."));
    CHECK_THAT(lines[3], Contains("step-00000012") && Contains(said));
    CHECK(untimed_metrics(run_).size() == 12);
    CHECK(contents(run_ / "checkpoints") == saved);  // and nothing half-written beside
    CHECK(contents(run_ / "adapter") == adapter);
    disk.empty();
  }

  // No room at all: it does not begin.
  disk.fill(0);
  refused(train("steps=12"), Contains("No space left on device") && Contains("free some space"));
  CHECK(contents(run_ / "checkpoints") == saved);
  CHECK(untimed_metrics(run_).size() == 12);
  disk.empty();

  CHECK(train("steps=12").exit == 0);
  same_result(run_, setup.folder("whole"));

  // A run that begins is warned of it as well.
  disk.fill(60'000);
  const std::string first = "run=" + (setup.model.folder / "disk/first").string();
  const RunResult begun = setup.train({first, "steps=3"}, [&] { disk.enter(); });
  CHECK(begun.exit == 1);
  const auto lines = lines_of(begun.err);
  REQUIRE(lines.size() == 2);
  CHECK_THAT(lines[0], Contains("checkpoints and adapter will need") && Contains("but the disk has"));
  CHECK_THAT(lines[1], Contains("free some space"));
}

TEST_CASE("training: a disk that has room again is used again by the same process") {
  const Setup setup;
  REQUIRE(setup.train({"run=" + setup.folder("whole")}).exit == 0);
  const SmallDisk disk(setup.model.folder / "disk");
  if (!disk.there()) return;
  const std::string words = "run=" + (setup.model.folder / "disk/run").string();
  const fs::path run_ = disk.path() / "run";
  disk.fill(300'000);
  const std::string said = setup.folder("said");
  const pid_t child = start({"train", setup.recipe(), words, "--threads", "1"}, [&] {
    disk.enter();
    ::setenv("TAPETUNE_STOP_AT", "step:4", 1);
    redirect(said, stderr);
    redirect("/dev/null", stdout);
  });
  int status = 0;
  ::waitpid(child, &status, WUNTRACED);
  REQUIRE(WIFSTOPPED(status));
  CHECK(fs::is_empty(run_ / "checkpoints"));
  disk.empty();
  ::kill(child, SIGCONT);
  ::waitpid(child, &status, 0);
  const auto lines = lines_of(read_file(said));
  INFO(read_file(said));
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  REQUIRE(lines.size() == 2);  // the second and third checkpoint had room
  CHECK_THAT(lines[0], Contains("checkpoints and adapter will need"));
  CHECK_THAT(lines[1], Contains("step 3: [") && Contains("Training continues; the last checkpoint is of step 0."));
  CHECK(fs::exists(run_ / "checkpoints/step-00000009"));
  same_result(run_, setup.folder("whole"));
}

TEST_CASE("training: metrics that cannot be written stop the run, and the last checkpoint stays") {
  const Setup setup("{method: lora, rank: 1, targets: [q]}");  // checkpoints that stay below the limit
  const std::string steps = "steps=90";
  REQUIRE(setup.train({"run=" + setup.folder("whole"), steps}).exit == 0);
  const RunResult limited = setup.train({steps}, [] {
    const rlimit limit{12'000, 12'000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  });
  refused(limited, Contains("cannot be written"));
  const fs::path run_ = setup.folder("run");
  const std::string lines = read_file(run_ / "metrics.jsonl");
  const auto steps_done = std::count(lines.begin(), lines.end(), '\n');
  CHECK(steps_done > 20);
  const auto saved_at = [&](std::int64_t step) {
    return fs::exists(run_ / fmt::format("checkpoints/step-{:08}/state.json", step));
  };
  CHECK((saved_at(steps_done / 3 * 3) || saved_at((steps_done - 1) / 3 * 3)));
  CHECK_FALSE(fs::exists(run_ / "adapter"));
  CHECK(setup.train({steps}).exit == 0);
  same_result(run_, setup.folder("whole"));
}

TEST_CASE("training: a run folder that cannot be written") {
  const Setup setup;
  REQUIRE(setup.train({"steps=3"}).exit == 0);
  const fs::path run_ = setup.folder("run");
  const auto before = contents(run_);
  for (const char* folder : {"run", "run/checkpoints"}) {
    fs::permissions(setup.folder(folder), fs::perms::owner_read | fs::perms::owner_exec);
  }
  const RunResult result = setup.train({"steps=6"}, obey_permissions);
  refused(result, Contains("run/") && Contains("Permission denied") && Contains("choose another"));
  refused(setup.train({"run=" + setup.folder("run/new")}, obey_permissions),
          Contains("run/new: cannot be created: Permission denied; choose another run folder"));
  for (const char* folder : {"run", "run/checkpoints"}) fs::permissions(setup.folder(folder), fs::perms::owner_all);
  auto after = contents(run_);
  after["lock"] = before.at("lock");  // the number of the last process
  CHECK(after == before);
  write_file(setup.folder("file"), "precious");
  refused(setup.train({"run=" + setup.folder("file")}), Contains("file: cannot be created: Not a directory"));
  CHECK(read_file(setup.folder("file")) == "precious");
}

TEST_CASE("training: a run folder on a read-only disk") {
  const Setup setup;
  REQUIRE(setup.train({"run=" + setup.folder("whole"), "steps=6"}).exit == 0);
  const SmallDisk disk(setup.model.folder / "disk");
  if (!disk.there()) return;
  const std::string run_ = (setup.model.folder / "disk/run").string();
  REQUIRE(setup.train({"run=" + run_, "steps=3"}, [&] { disk.enter(); }).exit == 0);
  const auto before = contents(disk.path() / "run");
  refused(setup.train({"run=" + run_, "steps=6"}, [&] { disk.enter_read_only(); }),
          Contains("run/lock: cannot be written: Read-only file system; choose another run folder"));
  refused(setup.train({"run=" + run_ + "2"}, [&] { disk.enter(); }),
          Contains("run2") && Contains("cannot be created: Read-only file system; choose another run folder"));
  CHECK(contents(disk.path() / "run") == before);
  const auto writable = [&] {
    disk.enter();
    if (::mount("none", (setup.model.folder / "disk").c_str(), nullptr, MS_REMOUNT, nullptr) != 0) ::_exit(99);
  };
  CHECK(setup.train({"run=" + run_, "steps=6"}, writable).exit == 0);
  same_result(disk.path() / "run", setup.folder("whole"));
}

TEST_CASE("training: data that is empty, missing, unreadable or packed for another model makes no run folder") {
  const Setup setup;
  const std::string bad = setup.folder("bad.tokens");
  const auto refuse = [&](const auto& matcher, const std::vector<std::string>& words = {}) {
    std::vector<std::string> all{"data=" + bad};
    all.insert(all.end(), words.begin(), words.end());
    refused(setup.train(all, obey_permissions), matcher);
    CHECK_FALSE(fs::exists(setup.folder("run")));
  };
  refuse(Contains("bad.tokens") && Contains("No such file"));
  fs::create_directory(bad);
  refuse(Contains("bad.tokens: contains no .txt or .jsonl"));
  fs::remove(bad);
  write_file(bad, "");
  refuse(Contains("bad.tokens: is empty"));
  write_file(bad, "Once upon a time there was a text that nobody had packed.");
  refuse(Contains("bad.tokens") && Contains("is not a token file") && Contains("data pack") &&
         Contains("need the extension .bin") && !Contains("give --raw"));
  const std::string good = read_file(setup.data());
  write_file(bad, good.substr(0, good.size() / 2));
  refuse(Contains("bad.tokens") && Contains("but its header says"));
  write_file(bad, good);
  fs::permissions(bad, fs::perms::none);
  refuse(Contains("bad.tokens") && Contains("Permission denied") && Contains("check the permissions"));
  fs::permissions(bad, fs::perms::owner_all);
  refuse(Contains("bad.tokens: has 4000 tokens, but one window of context 4000 needs 4001") && Contains("at most 3999"),
         {"context=4000"});
  const fs::path folder = setup.model.folder / "short";
  fs::create_directory(folder);
  write_file(folder / "raw.bin", "\x05");
  refused(setup.train({"data=" + (folder / "raw.bin").string()}),
          Contains("raw.bin") && Contains("not a multiple of two"));

  Json tokenizer = from_text(read_file(setup.model / "tokenizer.json"));
  std::swap(tokenizer["model"]["vocab"]["[60]"], tokenizer["model"]["vocab"]["[59]"]);
  write_file(setup.model / "tokenizer.json", to_text(tokenizer));
  refuse(Contains("bad.tokens was packed with another tokenizer"));
}

TEST_CASE("training: a recipe with mistakes says all of them and makes no run folder") {
  const Setup setup;
  const std::string right = read_file(setup.recipe());
  const auto says = [&](const std::string& text, const std::vector<std::string>& words,
                        const std::vector<std::string>& expected) {
    write_file(setup.recipe(), text);
    const RunResult result = setup.train(words);
    CHECK(result.exit == 1);
    CHECK(result.out.empty());
    const auto lines = lines_of(result.err);
    INFO(result.err);
    REQUIRE(lines.size() == expected.size());
    for (std::size_t i = 0; i < lines.size(); ++i) CHECK_THAT(lines[i], Contains(expected[i]));
    CHECK_FALSE(fs::exists(setup.folder("run")));
  };
  says(fmt::format("model: {}\ndata: {}\nrun: {}\ncontext: -3\nadapter: {{method: lroa}}\nstpes: 3\nsteps: many\n"
                   "batch: 4\nmicro_batch: 0\n",
                   setup.model.path(), setup.data(), setup.folder("run")),
       {},
       {"recipe.yaml:4: context must be", "recipe.yaml:5: there is no method \"lroa\"",
        "recipe.yaml:6: unknown key \"stpes\" (did you mean steps?)", "recipe.yaml:7: steps must be",
        "recipe.yaml:9: micro_batch must be"});
  says("- model\n- data\n", {}, {"recipe.yaml:1: a recipe is a map of keys"});
  says(right, {"stepps=3"}, {"command line: unknown key \"stepps\" (did you mean steps?)"});
  says(right, {"optimizer.lr=fast", "no.such.key=1"}, {"unknown key \"no.such.key\"", "optimizer.lr must be"});
}

TEST_CASE("data pack: an unreadable file, and invalid UTF-8 in a .jsonl") {
  const TinyModel model;
  const std::string text = (model.folder / "f.jsonl").string(), out = model.out();
  write_file(text, "{\"text\": \"ab\"}\n{\"text\": \"a\xff\xfe z\xc3\"}\n");
  fs::permissions(text, fs::perms::none);
  refused(run({"data", "pack", text, "--model", model.path(), "--out", out}, obey_permissions),
          Contains("f.jsonl") && Contains("Permission denied"));
  CHECK_FALSE(fs::exists(out));
  fs::permissions(text, fs::perms::owner_all);
  const RunResult packed = run({"data", "pack", text, "--model", model.path(), "--out", out});
  CHECK(packed.exit == 0);
  CHECK_THAT(packed.err, Contains("3 parts of the text replaced by U+FFFD"));
  CHECK(lines_of(packed.err).size() == 1);
  CHECK_THAT(packed.out, Contains("in 2 documents"));
}

TEST_CASE("training: NaN in any weight of the base is named, whether it trains or not") {
  for (const auto& [adapter, name] :
       {std::pair("{method: lora, rank: 2}", "model.layers.1.self_attn.k_proj.bias"),
        std::pair("{method: theta-scaling, rank: 2}", "model.layers.0.mlp.down_proj.bias"),
        std::pair("{method: tape}", "model.layers.0.input_layernorm.weight"),
        std::pair("{method: longlora, rank: 2}", "lm_head.weight"),
        std::pair("{method: full}", "model.layers.1.self_attn.o_proj.weight")}) {
    INFO(adapter << " " << name);
    const Setup setup(adapter);
    auto tensors = load_tensors(setup.model / "model.safetensors");
    for (auto& [key, tensor] : tensors) tensor = tensor.clone();
    tensors.at(name).view(-1)[1] = NAN;
    save_safetensors(setup.model / "model.safetensors", tensors, true, {{"format", "pt"}});
    refused(setup.train(), Contains(fmt::format("step 1: the base model's weight {} has NaN or Inf", name)) &&
                               Contains("download or copy it again"));
    CHECK(fs::is_empty(fs::path(setup.folder("run")) / "checkpoints"));
    CHECK_FALSE(fs::exists(setup.folder("run") + "/adapter"));
  }
}

TEST_CASE("training: a run of an earlier version says once that its draws change") {
  const Setup setup("{method: lora, rank: 2, dropout: 0.3}");
  REQUIRE(setup.train({"steps=3"}).exit == 0);
  const fs::path state = fs::path(setup.folder("run")) / "checkpoints/step-00000003/state.json";
  Json json = from_text(read_file(state));
  CHECK(json.at("draws") == "sequence");
  json.erase("draws");
  write_file(state, to_text(json, 2));
  fs::remove(state.parent_path() / "hashes.json");
  const RunResult later = setup.train({"steps=6"});
  CHECK(later.exit == 0);
  CHECK_THAT(later.err, Contains("from step 4 on, dropout and random offsets are drawn for each sequence"));
  const RunResult after = setup.train({"steps=9"});
  CHECK(after.exit == 0);
  CHECK_THAT(after.err, !Contains("are drawn for each sequence"));
}

TEST_CASE("training: one by eight is eight by one to rounding, for every method") {
  for (const std::string adapter :
       {"{method: lora, rank: 2}", "{method: longlora, rank: 2}", "{method: theta-scaling, rank: 2}", "{method: tape}",
        "{method: full}", "{method: lora, rank: 2, dropout: 0.3, targets: [q, v, down, lm_head]}",
        "{method: tape, rank: 2, dropout: 0.2, random_offset: true}"}) {
    INFO(adapter);
    const Setup setup(adapter);
    REQUIRE(setup.train({"run=" + setup.folder("eight"), "micro_batch=8"}).exit == 0);
    const auto together = untimed_metrics(setup.folder("eight"));
    for (const std::string micro_batch : {"1", "3"}) {  // 3: two of three sequences and one of two
      REQUIRE(setup.train({"run=" + setup.folder(micro_batch), "micro_batch=" + micro_batch}).exit == 0);
      const auto apart = untimed_metrics(setup.folder(micro_batch));
      REQUIRE(apart.size() == 12);
      for (std::size_t i = 0; i < apart.size(); ++i) {
        const auto value = [&](const std::vector<Json>& lines, const char* key) { return lines[i][key].get<double>(); };
        CHECK(std::abs(value(apart, "loss") - value(together, "loss")) < 1e-5);
        CHECK(std::abs(value(apart, "grad_norm") / value(together, "grad_norm") - 1) < 1e-4);
      }
    }
  }
}

TEST_CASE("training: the command of a finished run changes nothing and says so") {
  const Setup setup;
  const RunResult first = setup.train();
  REQUIRE(first.exit == 0);
  const fs::path run_ = setup.folder("run");
  const auto before = contents(run_ / "adapter");
  const std::string lines = read_file(run_ / "metrics.jsonl");
  const RunResult again = setup.train();
  CHECK(again.exit == 0);
  CHECK(lines_of(again.out).front() == lines_of(first.out).front());
  CHECK_THAT(again.err, Contains("note: 12 steps done already"));
  CHECK(contents(run_ / "adapter") == before);
  CHECK(read_file(run_ / "metrics.jsonl") == lines);
}

TEST_CASE("training: fewer steps than a run has done are refused, and its recipe stays") {
  const Setup setup;
  REQUIRE(setup.train().exit == 0);
  const auto before = contents(setup.folder("run"));
  refused(setup.train({"steps=9"}), Contains("has trained 12 steps already, but steps=9; give at least 12"));
  auto after = contents(setup.folder("run"));
  after["lock"] = before.at("lock");  // the number of the last process
  CHECK(after == before);
}

TEST_CASE("training: an evaluation that an interruption left out is made up for") {
  const Setup setup;
  const auto train = [&](const std::string& name) {
    return setup.train({"held_out=0.1", "eval_every=4", "save_every=4", "run=" + setup.folder(name)});
  };
  REQUIRE(train("whole").exit == 0);
  REQUIRE(train("run").exit == 0);
  // As Ctrl-C leaves it that comes while the evaluation after step 8 runs.
  const fs::path run = setup.folder("run"), state = run / "checkpoints/step-00000008/state.json";
  const std::size_t before = read_file(run / "metrics.jsonl").find("{\"step\":8,\"eval_loss\"");
  REQUIRE(before != std::string::npos);
  Json json = from_text(read_file(state));
  json["evaluated"] = 4;
  json["metrics_bytes"] = before;
  write_file(state, to_text(json));
  fs::remove(state.parent_path() / "hashes.json");
  fs::remove_all(run / "checkpoints/step-00000012");
  fs::remove_all(run / "adapter");
  REQUIRE(train("run").exit == 0);
  same_result(run, setup.folder("whole"));
}

TEST_CASE("training: what is left of a killed process is cleared, and metrics that were removed are not made up") {
  const Setup setup;
  REQUIRE(setup.train({"steps=6"}).exit == 0);
  const fs::path run_ = setup.folder("run");
  fs::create_directory(run_ / "checkpoints/.step-00000009.partial-7");
  write_file(run_ / "checkpoints/.step-00000009.partial-7/state.json", "{");
  write_file(run_ / ".recipe.yaml.partial-7", "model: ");
  fs::remove(run_ / "metrics.jsonl");
  const RunResult shorter = setup.train({"steps=9"});
  CHECK(shorter.exit == 0);
  CHECK_THAT(shorter.err, Contains("metrics.jsonl"));
  CHECK(setup.train({"steps=12"}).exit == 0);
  const auto left = untimed_metrics(run_);
  REQUIRE(left.size() == 6);
  CHECK(left.front()["step"] == 7);
  CHECK(left.back()["step"] == 12);
  for (const auto& [name, text] : contents(run_)) CHECK(name.find("partial") == std::string::npos);
}

}  // namespace run_test
