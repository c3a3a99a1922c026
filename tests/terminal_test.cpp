// Progress as a terminal shows it: a pseudoterminal of a given width, and a program that stops at a known moment.
#include <poll.h>
#include <pty.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>

#include "catch.h"
#include "support.h"

namespace terminal_test {

using namespace tapetune;
using namespace tapetune::test;

namespace {

using Words = std::vector<std::string>;

// A recipe of 3 steps of 32 tokens.
struct Setup {
  Setup() {
    tiny_tokens(model, model.folder / "data.tokens", 2000);
    write_file(recipe(),
               fmt::format("model: {}\ndata: {}\nrun: {}\ncontext: 16\nadapter: {{method: lora, rank: 2}}\n"
                           "steps: 3\nbatch: 2\nsave_every: 0\ndtype: f32\n",
                           model.path(), (model.folder / "data.tokens").string(), (model.folder / "run").string()));
  }
  std::string recipe() const { return (model.folder / "recipe.yaml").string(); }
  TinyModel model;
};

// The binary on a terminal of its own, which stops when its first training step is done.
class Terminal {
 public:
  Terminal(const Words& words, unsigned short columns) {
    const winsize size{24, columns, 0, 0};
    child_ = ::forkpty(&terminal_, nullptr, nullptr, &size);
    if (child_ != 0) return;
    exec_binary(words, [] {
      ::setenv("TERM", "xterm", 1);
      ::setenv("TAPETUNE_STOP_AT", "step:1", 1);
    });
  }
  ~Terminal() {
    if (child_ > 0) {
      ::kill(child_, SIGKILL);
      ::waitpid(child_, nullptr, 0);
    }
    if (terminal_ >= 0) ::close(terminal_);
  }
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;

  bool there() const { return child_ > 0; }

  // What it has printed when it stops.
  std::string until_stopped() {
    int status = 0;
    ::waitpid(child_, &status, WUNTRACED);
    REQUIRE(WIFSTOPPED(status));
    std::string text;
    pollfd ready{terminal_, POLLIN, 0};
    while (::poll(&ready, 1, 0) == 1 && read_into(text)) {
    }
    return text;
  }
  void resize(unsigned short columns) const {
    const winsize size{24, columns, 0, 0};
    REQUIRE(::ioctl(terminal_, TIOCSWINSZ, &size) == 0);
  }
  // What it prints from then on.
  std::string to_the_end() {
    ::kill(child_, SIGCONT);
    std::string text;
    while (read_into(text)) {
    }
    int status = 0;
    ::waitpid(std::exchange(child_, -1), &status, 0);
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0);
    return text;
  }

 private:
  bool read_into(std::string& text) const {
    char bytes[256];
    const ssize_t count = ::read(terminal_, bytes, sizeof bytes);
    if (count > 0) text.append(bytes, static_cast<std::size_t>(count));
    return count > 0;
  }
  int terminal_ = -1;
  pid_t child_ = -1;
};

bool skipped(const Terminal& terminal) {
  if (!terminal.there()) fmt::print("SKIPPED: no pseudoterminal can be opened\n");
  return !terminal.there();
}

// Each line that was drawn over the one before.
Words drawn(const std::string& text) {
  const std::string clear = "\r\033[K";
  Words lines;
  for (std::size_t at = text.find(clear); at != std::string::npos; at = text.find(clear, at + 1)) {
    const std::size_t begin = at + clear.size();
    lines.push_back(text.substr(begin, text.find_first_of("\r\n", begin) - begin));
  }
  return lines;
}

}  // namespace

TEST_CASE("progress is on the screen before the first step ends, and follows the width of the terminal") {
  const Setup setup;
  Terminal terminal({"train", setup.recipe(), "--threads", "1"}, 40);
  if (skipped(terminal)) return;
  CHECK(drawn(terminal.until_stopped()) == Words{"[            ] train   0%  step 1/3"});
  terminal.resize(30);
  const std::string rest = terminal.to_the_end();
  const Words lines = drawn(rest);
  INFO(rest);
  REQUIRE_FALSE(lines.empty());
  for (const std::string& line : lines) CHECK(line.size() < 30);
  CHECK_THAT(lines.back(), Contains("100%  step 3/3  loss ") && !Contains("train"));
}

TEST_CASE("progress of a resumed run is that of the whole run") {
  const Setup setup;
  REQUIRE(run({"train", setup.recipe(), "--threads", "1"}).exit == 0);
  Terminal terminal({"train", setup.recipe(), "steps=4", "--threads", "1"}, 80);
  if (skipped(terminal)) return;
  const std::string text = terminal.until_stopped();
  CHECK_THAT(text, Contains("resuming at step 3 of 4"));
  CHECK(drawn(text) == Words{"[==================      ] train  75%  96 tokens  step 4/4"});
  CHECK_THAT(drawn(terminal.to_the_end()).back(), Contains("train 100%"));
}

TEST_CASE("progress is not drawn with --quiet, nor into a file before there is any") {
  const Setup setup;
  CHECK_THAT(run({"train", setup.recipe(), "steps=1", "--threads", "1"}).err, !Contains("train   0%"));
  Terminal terminal({"--quiet", "train", setup.recipe(), "--threads", "1"}, 80);
  if (skipped(terminal)) return;
  CHECK(drawn(terminal.until_stopped()).empty());
  CHECK(drawn(terminal.to_the_end()).empty());
}

}  // namespace terminal_test
