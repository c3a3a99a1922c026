// What the program says about itself, and of wrong words on its command line.
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <regex>

#include "catch.h"
#include "model/device.h"
#include "support.h"

using namespace tapetune;
using namespace tapetune::test;

namespace {

using Words = std::vector<std::string>;

// Every command, and those within commands.
const std::vector<Words> commands = {{"inspect"},
                                     {"generate"},
                                     {"logits"},
                                     {"tokenize"},
                                     {"convert"},
                                     {"import"},
                                     {"export"},
                                     {"data"},
                                     {"data", "pack"},
                                     {"data", "show"},
                                     {"adapter"},
                                     {"check"},
                                     {"check", "gradients"},
                                     {"check", "shift"},
                                     {"plan"},
                                     {"recipes"},
                                     {"recipes", "ls"},
                                     {"recipes", "show"},
                                     {"recipes", "cp"},
                                     {"recipes", "validate"},
                                     {"recipes", "keys"},
                                     {"train"},
                                     {"launch"},
                                     {"merge"},
                                     {"verify"},
                                     {"eval"},
                                     {"eval", "perplexity"},
                                     {"eval", "passkey"},
                                     {"eval", "choice"},
                                     {"compare"}};

std::string spoken(const Words& words) { return fmt::format("tapetune {}", fmt::join(words, " ")); }

Words with(Words words, const Words& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

std::string usage_error(const Words& words) {
  const RunResult result = run(words);
  INFO(spoken(words) << ": " << result.err);
  CHECK(result.exit == 2);
  CHECK(result.out.empty());
  CHECK(result.err.rfind("error: [usage] ", 0) == 0);
  CHECK(std::count(result.err.begin(), result.err.end(), '\n') == 1);
  return result.err;
}

}  // namespace

TEST_CASE("usage: errors are coloured on a terminal, unless NO_COLOR is set") {
  const auto with = [](const char* no_color) {
    return on_terminal({"no-such-command"}, [=] {
      ::setenv("TERM", "xterm-256color", 1);
      ::setenv("NO_COLOR", no_color, 1);
    });
  };
  const auto coloured = with(""), plain = with("1");
  if (!coloured || !plain) {
    fmt::print("SKIPPED: no pseudoterminal can be opened\n");
    return;
  }
  CHECK_THAT(*coloured, Contains("\033[") && Contains("error") && Contains("no-such-command"));
  CHECK(plain->starts_with("error: [usage] \"no-such-command\" is not a command"));
}

TEST_CASE("usage: every command has help with an example on 80 columns") {
  for (const Words& words : commands) {
    const RunResult help = run(with(words, {"--help"}));
    INFO(help.out);
    CHECK(help.exit == 0);
    CHECK(help.err.empty());
    CHECK_THAT(help.out, !Contains("{false}"));  // CLI11's own notation of a negated flag
    CHECK_THAT(help.out, Contains("example: ") && Contains("Usage: " + spoken(words)) && Contains(spoken(words)));
    for (std::size_t begin = 0; begin < help.out.size();) {
      const std::size_t end = help.out.find('\n', begin);
      REQUIRE(end != std::string::npos);
      std::int64_t columns = 0;
      for (std::size_t i = begin; i < end; ++i) columns += (help.out[i] & 0xC0) != 0x80 ? 1 : 0;
      CHECK(columns <= 80);
      begin = end + 1;
    }
    CHECK(run(with({"help"}, words)).out == help.out);
  }
  const RunResult all = run({"--help"});
  CHECK(all.exit == 0);
  for (const Words& words : commands) CHECK_THAT(all.out, Contains("\n  " + words.front() + " "));
  CHECK(run({"help"}).out == all.out);
}

TEST_CASE("usage: an example broken into lines is one command for a shell") {
  for (const Words& words : commands) {
    const std::string help = run(with(words, {"--help"})).out;
    const std::string examples = help.substr(help.find("example: ") + 9);
    const std::string joined = std::regex_replace(examples, std::regex(" \\\\\n *"), " ");
    INFO(examples);
    for (std::size_t begin = 0; begin < joined.size(); begin = joined.find('\n', begin) + 1) {
      const std::string line = joined.substr(begin, joined.find('\n', begin) - begin);
      CHECK(std::regex_search(line, std::regex("^ *(echo .* \\| )?tapetune ")));
    }
  }
  const std::string help = run({"launch", "--help"}).out;
  const std::string example = help.substr(help.find("example: ") + 9);
  const std::string joined = std::regex_replace(example, std::regex(" \\\\\n *"), " ");
  CHECK(joined == "tapetune launch --nproc 8 -- train llama2-7b-8k/tape model=/models/Llama-2-7b-hf data=rp.tokens\n");
}

TEST_CASE("usage: --version tells version, commit, LibTorch and devices") {
  const RunResult version = run({"--version"});
  CHECK(version.exit == 0);
  INFO(version.out);
  CHECK(std::regex_search(version.out, std::regex("^tapetune [0-9.]+ \\(commit ([0-9a-f]{12}|unknown)\\)\n")));
  CHECK(std::regex_search(version.out, std::regex("\nLibTorch 2\\.[0-9]+\\.[0-9]+")));
  CHECK_THAT(version.out, Contains("\ndevices: CPU (") && Contains("CUDA"));
}

TEST_CASE("usage: errors name the help of the command that was meant") {
  for (const Words& words : commands) {
    // A command within it is asked for first.
    const std::string said = usage_error(with(words, {"--no-such-option"}));
    CHECK_THAT(said, Contains("; see " + spoken(words) + " --help\n"));
  }
  CHECK_THAT(usage_error({}), Contains("tapetune needs a command: ") && Contains("train") && !Contains("help,"));
  CHECK_THAT(usage_error({"--verison"}),
             Contains("--verison is not an option of tapetune (did you mean --version?); see tapetune --help"));
  CHECK_THAT(usage_error({"train", "r", "--=5"}), Contains("--=5 is not an option of tapetune train; see"));
  CHECK_THAT(usage_error({"plan", "r", "--flops=-1"}), Contains("-1 is negative; give a number >= 0"));
  CHECK_THAT(usage_error({"eval"}), Contains("tapetune eval needs a command: perplexity, passkey, choice"));
  CHECK_THAT(usage_error({"trian", "--help"}), Contains("\"trian\" is not a command (did you mean train?)"));
  CHECK_THAT(usage_error({"plan", "r", "--gpu", "24"}),
             Contains("24 is less than a megabyte; write it with its unit, as 24GB;"));
  CHECK_THAT(usage_error({"plan", "r", "--gpu", "80k"}),
             Contains("80k is less than a megabyte; write it with its unit, as 80GB;"));
  CHECK_THAT(usage_error({"plan", "r", "--link", "0.5kB"}), Contains(", as 0.5GB;"));
  CHECK_THAT(usage_error({"plan", "r", "--gpu", "0"}),
             Contains("0 is less than a megabyte; write it with its unit, as 80GB;"));
  CHECK_THAT(usage_error({"trian", "x.yaml"}), Contains("\"trian\" is not a command (did you mean train?)"));
  CHECK_THAT(usage_error({"-q", "mrege", "runs/x"}), Contains("did you mean merge?"));
  CHECK_THAT(usage_error({"xyzxyzxyz"}), Contains("\"xyzxyzxyz\" is not a command; see tapetune --help"));
  CHECK_THAT(usage_error({"perplexity", "m"}), Contains("did you mean eval perplexity?"));
  CHECK_THAT(usage_error({"eval", "perplexty", "m"}),
             Contains("is not a command of tapetune eval (did you mean perplexity?); see tapetune eval --help"));
  CHECK_THAT(usage_error({"help", "trian"}), Contains("did you mean train?"));
  CHECK_THAT(usage_error({"generate", "m", "--prompt", "x", "--max-new-token", "3"}),
             Contains("--max-new-token is not an option of tapetune generate (did you mean --max-new-tokens?)"));
}

TEST_CASE("usage: a setting of the recipe that is given as an option is shown as it must be written") {
  CHECK_THAT(usage_error({"train", "x.yaml", "--steps", "5"}), Contains("write steps=5; see tapetune train --help"));
  CHECK_THAT(usage_error({"train", "x.yaml", "--steps=5"}), Contains("write steps=5;"));
  CHECK_THAT(usage_error({"plan", "x.yaml", "--micro-batch", "2"}), Contains("write micro_batch=2; see tapetune plan"));
  CHECK_THAT(usage_error({"compare", "x.yaml", "--out", "o", "--lr", "1e-4"}),
             Contains("--lr is a setting of the recipe, not an option: write optimizer.lr=1e-4;"));
  CHECK_THAT(usage_error({"train", "x.yaml", "--steps"}), Contains("write steps=VALUE;"));
  CHECK_THAT(usage_error({"inspect", "m", "--steps", "5"}), !Contains("steps="));
}

TEST_CASE("usage: launch asks for -- before a command, and takes only commands that share work") {
  CHECK_THAT(usage_error({"launch", "--nproc", "2", "train", "x.yaml", "--device", "cpu"}),
             Contains("put -- before the command: tapetune launch --nproc 2 -- train"));
  CHECK_THAT(usage_error({"launch", "--nproc", "2"}), Contains("put -- before the command"));
  const TempFolder folder;
  for (const Words& words : std::vector<Words>{{"merge", "runs/x", "--out", (folder / "out").string()},
                                               {"recipes", "ls"},
                                               {"generate", "m", "--prompt", "x"}}) {
    CHECK_THAT(usage_error(with({"launch", "--nproc", "2", "--"}, words)),
               Contains("runs in one process; run it without launch. Commands that share work: ") &&
                   Contains("train") && Contains("compare") && Contains("eval perplexity") &&
                   Contains("eval passkey") && Contains("eval choice") && !Contains("merge,"));
  }
  CHECK_THAT(usage_error({"launch", "--nproc", "2", "--", "trian", "x"}), Contains("did you mean train?"));
  CHECK_THAT(usage_error({"launch", "--nproc", "2", "--", "eval"}),
             Contains("launch: tapetune eval needs a command: perplexity, passkey, choice; see tapetune eval --help"));
  CHECK(std::filesystem::is_empty(folder.path()));
}

TEST_CASE("a GPU that this build cannot use is told in a line, once") {
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  const std::string before = visible == nullptr ? "" : visible;
  ::unsetenv("CUDA_VISIBLE_DEVICES");
  const TempFolder root;
  CHECK_FALSE(has_gpu(root.path()));
  std::filesystem::create_directories(root / "proc/driver/nvidia");
  CHECK(has_gpu(root.path()));
  std::filesystem::remove_all(root / "proc");
  std::filesystem::create_directories(root / "dev");
  write_file(root / "dev/nvidia0", "");
  CHECK(has_gpu(root.path()));
  for (const char* none : {"", "-1"}) {
    ::setenv("CUDA_VISIBLE_DEVICES", none, 1);
    CHECK_FALSE(has_gpu(root.path()));
  }
  ::setenv("CUDA_VISIBLE_DEVICES", "0", 1);
  CHECK(has_gpu(root.path()));
  visible == nullptr ? ::unsetenv("CUDA_VISIBLE_DEVICES") : ::setenv("CUDA_VISIBLE_DEVICES", before.c_str(), 1);
#ifndef TAPETUNE_CUDA
  const TinyModel model;
  const auto driver = [] {
    ::unsetenv("CUDA_VISIBLE_DEVICES");
    if (::unshare(CLONE_NEWNS) != 0 || ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("none", "/proc/driver", "tmpfs", 0, nullptr) != 0 || ::mkdir("/proc/driver/nvidia", 0755) != 0) {
      ::_exit(99);
    }
  };
  const Words words{"generate", model.path(), "--prompt", "ab", "--max-new-tokens", "1"};
  const RunResult told = run(words, driver);
  if (told.exit == 99) {
    fmt::print("SKIPPED: mounting a driver's folder needs root\n");
    return;
  }
  REQUIRE(told.exit == 0);
  CHECK(told.err.rfind("note: this machine has a GPU, but this build", 0) == 0);
  CHECK(std::count(told.err.begin(), told.err.end(), '\n') == 1);
  CHECK_THAT(told.err, Contains("tools/build cuda"));
  CHECK(run(with(words, {"--device", "cpu"}), driver).err.empty());
  CHECK(run(with({"-q"}, words), driver).err.empty());
  CHECK(run(words, [&] {
          driver();
          ::setenv("CUDA_VISIBLE_DEVICES", "", 1);
        }).err.empty());
#endif
}
