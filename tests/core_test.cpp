#include <linux/seccomp.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <fstream>

#include "catch.h"
#include "core/cores.h"
#include "core/error.h"
#include "core/file.h"
#include "core/json.h"
#include "core/partial.h"
#include "support.h"

namespace core_test {

using namespace tapetune;
using namespace tapetune::test;
namespace fs = std::filesystem;

TEST_CASE("an error is one line that opens with its component") {
  CHECK_THROWS_WITH(fail("part", "{}\nmore", 3), "[part] 3 more");
}

TEST_CASE("a container's CPU quota limits the cores, rounded up, whichever cgroup sets it") {
  const TempFolder folder;
  const auto with = [&](const std::string& membership, const std::map<std::string, std::string>& files) {
    fs::remove_all(folder / "mount");
    for (const auto& [name, text] : files) {
      fs::create_directories((folder / "mount" / name).parent_path());
      write_file(folder / "mount" / name, text);
    }
    write_file(folder / "membership", membership);
    return available_cores(folder / "membership", folder / "mount");
  };
  const int all = with("0::/\n", {});
  CHECK(all >= 1);
  CHECK(with("0::/\n", {{"cpu.max", "max 100000\n"}}) == all);
  CHECK(with("0::/\n", {{"cpu.max", "50000 100000\n"}}) == 1);
  CHECK(with("0::/\n", {{"cpu.max", "150000 100000\n"}}) == std::min(all, 2));
  CHECK(with("0::/a/b\n", {{"a/cpu.max", "100000 100000\n"}, {"a/b/cpu.max", "max 100000\n"}}) == 1);
  CHECK(with("0::/of/the/host\n", {{"cpu.max", "20000 100000\n"}}) == 1);
  CHECK(with("5:memory:/m\n4:cpu,cpuacct:/c\n",
             {{"cpu/c/cpu.cfs_quota_us", "100000\n"}, {"cpu/c/cpu.cfs_period_us", "100000\n"}}) == 1);
  CHECK(with("4:cpu,cpuacct:/c\n", {{"cpu/c/cpu.cfs_quota_us", "-1\n"}, {"cpu/c/cpu.cfs_period_us", "100000\n"}}) ==
        all);
}

TEST_CASE("a staged folder is invisible until it is committed and gone when it is not") {
  const TempFolder folder;
  {
    StagedFolder staged(folder / "out", false);
    write_file(staged.path() / "file", "text");
    CHECK_FALSE(fs::exists(folder / "out"));
  }
  CHECK(fs::is_empty(folder.path()));
  StagedFolder staged(folder / "out/", false);  // a trailing slash is the same folder
  write_file(staged.path() / "file", "text");
  staged.commit();
  CHECK(read_file(folder / "out" / "file") == "text");
  CHECK(std::distance(fs::directory_iterator(folder.path()), fs::directory_iterator()) == 1);
}

TEST_CASE("an existing folder is refused, or replaced whole") {
  const TempFolder folder;
  fs::create_directory(folder / "out");
  write_file(folder / "out" / "old", "old");
  CHECK_THROWS_WITH(StagedFolder(folder / "out", false), Contains("already exists") && Contains("--force"));
  {
    StagedFolder staged(folder / "out", true);
    write_file(staged.path() / "new", "new");
    staged.commit();
  }
  CHECK(fs::exists(folder / "out" / "new"));
  CHECK_FALSE(fs::exists(folder / "out" / "old"));
  CHECK(std::distance(fs::directory_iterator(folder.path()), fs::directory_iterator()) == 1);
}

// A process that makes a partial of DIR/out and waits; with its number and the partial's path.
std::pair<pid_t, fs::path> start_writer(const fs::path& folder) {
  const pid_t writer = ::fork();
  if (writer == 0) {
    const StagedFolder staged(folder / "out", false);
    write_file(staged.path() / "file", "text");
    ::raise(SIGSTOP);
    ::_exit(0);  // as a kill would: nothing is cleaned up
  }
  int status = 0;
  ::waitpid(writer, &status, WUNTRACED);
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().filename().string().starts_with(".out.partial-")) return {writer, entry.path()};
  }
  return {writer, {}};
}

TEST_CASE("what a killed writer left is removed by the next, what a live one writes is not") {
  const TempFolder folder;
  const auto [writer, partial] = start_writer(folder.path());
  REQUIRE(fs::exists(partial / "file"));
  // Its process number says nothing: in another container it may be anybody's.
  CHECK(partial.filename().string().find(std::to_string(writer)) == std::string::npos);
  {
    const StagedFolder staged(folder / "out", false);
    const WholeFile other(folder / "other", false);
    CHECK(fs::exists(partial / "file"));
  }
  ::kill(writer, SIGKILL);
  ::waitpid(writer, nullptr, 0);
  CHECK(fs::exists(partial / "file"));
  const WholeFile other(folder / "other", false);
  CHECK(fs::exists(partial / "file"));  // of another target
  const StagedFolder staged(folder / "out", false);
  CHECK_FALSE(fs::exists(partial));
}

TEST_CASE("only names that tapetune gives to partials are removed") {
  const TempFolder folder;
  for (const char* name : {".out.partial-1", ".out.partial-", ".out.partial-0123456789abcdeg",
                           "out.partial-0123456789abcdef", ".out.partial-0123456789abcdef.txt", ".out.replaced-12"}) {
    write_file(folder / name, "mine");
  }
  const auto before = contents(folder.path());
  {
    const StagedFolder staged(folder / "out", false);
    remove_abandoned(folder.path());
  }
  CHECK(contents(folder.path()) == before);
}

TEST_CASE("a partial's name tells its target, also with the process number of earlier versions") {
  CHECK(partial_target(".out.partial-0123456789abcdef") == "out");
  CHECK(partial_target(".step-00000009.partial-4711") == "step-00000009");
  CHECK(partial_target(".a.partial-1.tokens.partial-7") == "a.partial-1.tokens");
  for (const char* name : {"out.partial-7", ".partial-7", ".out.partial-", ".out.partial-7.txt", ".out.partial-abc",
                           ".out.replaced-0123456789abcdef", ".out.removed"}) {
    INFO(name);
    CHECK_FALSE(partial_target(name).has_value());
  }
}

TEST_CASE("a partial is made as a new file, never through a link") {
  const TempFolder folder;
  write_file(folder / "victim", "precious");
  fs::create_symlink(folder / "victim", folder / "link");
  CHECK_THROWS_WITH(OutputFile(folder / "link"), Contains("File exists"));
  CHECK_THROWS_WITH(OutputFile(folder / "victim"), Contains("File exists"));
  CHECK(read_file(folder / "victim") == "precious");
}

TEST_CASE("a file that appears while another is being written is not replaced without --force") {
  const TempFolder folder;
  for (const bool replace : {false, true}) {
    fs::remove(folder / "f");
    WholeFile file(folder / "f", replace);
    file.write("ours");
    write_file(folder / "f", "theirs");
    if (!replace) CHECK_THROWS_WITH(file.commit(), Contains("already exists") && Contains("--force"));
    if (replace) file.commit();
    CHECK(read_file(folder / "f") == (replace ? "ours" : "theirs"));
  }
  CHECK(contents(folder.path()).size() == 1);
}

bool is_new_or_old(std::string_view name) { return name == "new" || name == "old"; }

TEST_CASE("a folder with files of others is not replaced, and three of them are named") {
  const TempFolder folder;
  fs::create_directories(folder / "out" / "mine");
  for (const char* name : {"old", "notes.txt", "a", "z"}) write_file(folder / "out" / name, name);
  const auto before = contents(folder.path());
  CHECK_THROWS_WITH(StagedFolder(folder / "out", true, is_new_or_old),
                    Contains("(a, mine/, notes.txt and 1 more)") && Contains("--force"));
  CHECK(contents(folder.path()) == before);
  for (const char* name : {"mine", "notes.txt", "a", "z"}) fs::remove(folder / "out" / name);
  {
    StagedFolder staged(folder / "out", true, is_new_or_old);
    write_file(folder / "out" / "late", "late");  // put there while the new one is written
    CHECK_THROWS_WITH(staged.commit(), Contains("(late)"));
  }
  CHECK(read_file(folder / "out" / "old") == "old");
  fs::remove(folder / "out" / "late");
  StagedFolder staged(folder / "out", true, is_new_or_old);
  staged.commit();
  CHECK(fs::is_empty(folder / "out"));
}

TEST_CASE("files of others can also move into the folder that replaces theirs") {
  const TempFolder folder;
  fs::create_directory(folder / "out");
  for (const char* name : {"old", "notes.txt"}) write_file(folder / "out" / name, name);
  {
    StagedFolder staged(folder / "out", true, is_new_or_old, StagedFolder::Others::keep);
    write_file(staged.path() / "new", "new");
    staged.commit();
  }
  CHECK(contents(folder.path()) ==
        std::map<std::string, std::string>{{"out", ""}, {"out/new", "new"}, {"out/notes.txt", "notes.txt"}});
}

// From here on this process has a file system without the flags of renameat2, and perhaps without hard links.
void without_rename_flags(bool links) {
  const auto refuse = [](unsigned call, unsigned argument, unsigned error) {
    return std::vector<sock_filter>{
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)), BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, static_cast<unsigned>(offsetof(seccomp_data, args)) + 8 * argument),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 0, 1, 0), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error)};
  };
  std::vector<sock_filter> code = refuse(SYS_renameat2, 4, EINVAL);  // where the flags are not 0
  if (!links) {
    const std::vector<sock_filter> more = refuse(SYS_link, 1, EPERM);  // the new name's address is not 0
    code.insert(code.end(), more.begin(), more.end());
  }
  filter_calls(std::move(code));
}

// Whether this, in a process on such a file system, does not throw.
bool succeeds_there(bool links, const std::function<void()>& work) {
  const pid_t child = ::fork();
  if (child == 0) {
    without_rename_flags(links);
    try {
      work();
    } catch (const std::exception&) {
      ::_exit(1);
    }
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

TEST_CASE("outputs are whole, and refused where they exist, on file systems that only know plain renames") {
  for (const bool links : {true, false}) {
    const TempFolder folder;
    const auto put_folder = [&](const char* text, bool replace) {
      return succeeds_there(links, [&] {
        StagedFolder staged(folder / "out", replace);
        write_file(staged.path() / "file", text);
        staged.commit();
      });
    };
    const auto put_file = [&](const char* text, bool replace) {
      return succeeds_there(links, [&] {
        WholeFile file(folder / "f", replace);
        file.write(text);
        file.commit();
      });
    };
    CHECK(put_folder("first", false));
    CHECK_FALSE(put_folder("second", false));
    CHECK(read_file(folder / "out/file") == "first");
    CHECK(put_folder("third", true));
    CHECK(put_file("first", false));
    CHECK(put_file("second", true));
    CHECK_FALSE(succeeds_there(links, [&] {
      fs::remove(folder / "f");
      WholeFile file(folder / "f", false);
      file.write("ours");
      write_file(folder / "f", "theirs");
      file.commit();
    }));
    CHECK_FALSE(succeeds_there(links, [&] {
      StagedFolder staged(folder / "made", false);
      fs::create_directory(folder / "made");
      write_file(folder / "made/file", "theirs");
      staged.commit();
    }));
    CHECK(contents(folder.path()) ==
          std::map<std::string, std::string>{
              {"f", "theirs"}, {"made", ""}, {"made/file", "theirs"}, {"out", ""}, {"out/file", "third"}});
    CHECK(std::distance(fs::directory_iterator(folder.path()), fs::directory_iterator()) == 3);
  }
}

TEST_CASE("a kill between two renames leaves the old folder, which gets its name back") {
  const TinyModel model;
  const fs::path out = model.out();
  const std::vector<std::string> words{"-q", "convert", model.path(), "--out", out.string(), "--force"};
  REQUIRE(run(words).exit == 0);
  const auto before = contents(out);
  const pid_t writer = start(words, [] {
    ::setenv("TAPETUNE_STOP_AT", "replaced:1", 1);
    without_rename_flags(true);
  });
  int status = 0;
  ::waitpid(writer, &status, WUNTRACED);
  REQUIRE(WIFSTOPPED(status));
  CHECK_FALSE(fs::exists(out));
  remove_abandoned(out.parent_path());  // it is alive, and may still put the new one in place
  CHECK_FALSE(fs::exists(out));
  ::kill(writer, SIGKILL);
  ::waitpid(writer, &status, 0);
  CHECK_THROWS_WITH(StagedFolder(out, false), Contains("already exists"));
  CHECK(contents(out) == before);
  CHECK(std::distance(fs::directory_iterator(out.parent_path()), fs::directory_iterator()) == 2);  // and the model
}

TEST_CASE("an output is never an input or a folder that holds one") {
  const TempFolder folder;
  const auto refusal = [&](const fs::path& out, const fs::path& in) {
    return error_of([&] { require_not_input(out, std::vector{in}); });
  };
  fs::create_directories(folder / "model/sub");
  for (const char* name : {"in.txt", "model/config.json", "model/x.gguf"}) write_file(folder / name, name);
  fs::create_symlink(folder / "in.txt", folder / "link.txt");
  fs::create_hard_link(folder / "in.txt", folder / "same.txt");
  CHECK_THAT(refusal(folder / "in.txt", folder / "in.txt"), Contains("is the input itself"));
  CHECK_THAT(refusal(folder / "link.txt", folder / "in.txt"), Contains("is the input itself"));
  CHECK_THAT(refusal(folder / "same.txt", folder / "in.txt"), Contains("is the input itself"));
  CHECK_THAT(refusal(folder / "model/../model/", folder / "model"), Contains("is the input itself"));
  CHECK_THAT(refusal(folder / "model", folder / "model/x.gguf"), Contains("holds the input"));
  CHECK_THAT(refusal(folder.path(), folder / "model/x.gguf"), Contains("holds the input"));
  CHECK_THAT(refusal(folder / "model/config.json", folder / "model"), Contains("is a file of the input"));
  CHECK(refusal(folder / "model/x.gguf", folder / "model") == "no error");
  CHECK(refusal(folder / "model/new.bin", folder / "model") == "no error");
  CHECK(refusal(folder / "other", folder / "model") == "no error");
}

TEST_CASE("where the user stands is never replaced") {
  const TempFolder folder;
  write_file(folder / "mine", "precious");
  const fs::path before = fs::current_path();
  fs::current_path(folder.path());
  for (const char* name : {".", "./", "x/..", ""}) CHECK_THROWS_AS(StagedFolder(name, true), Error);
  CHECK_THROWS_AS(StagedFolder(folder.path(), true), Error);
  CHECK_THROWS_AS(StagedFolder("/", true), Error);
  fs::current_path(before);
  CHECK(read_file(folder / "mine") == "precious");
}

TEST_CASE("a folder that appears while another is being written is not replaced") {
  const TempFolder folder;
  {
    StagedFolder staged(folder / "out", false);
    fs::create_directory(folder / "out");
    write_file(folder / "out" / "theirs", "precious");
    CHECK_THROWS_WITH(staged.commit(), Contains("already exists"));
  }
  CHECK(read_file(folder / "out" / "theirs") == "precious");
  CHECK(std::distance(fs::directory_iterator(folder.path()), fs::directory_iterator()) == 1);
}

TEST_CASE("a whole file replaces only when told and leaves nothing when it is not committed") {
  const TempFolder folder;
  write_file(folder / "f", "old");
  CHECK_THROWS_WITH(WholeFile(folder / "f", false), Contains("already exists"));
  {
    WholeFile(folder / "f", true).write("half");
  }
  CHECK(read_file(folder / "f") == "old");
  WholeFile file(folder / "f", true);
  file.write("new");
  file.commit();
  CHECK(read_file(folder / "f") == "new");
  CHECK(std::distance(fs::directory_iterator(folder.path()), fs::directory_iterator()) == 1);
}

TEST_CASE("mapping says what is wrong with a file") {
  const TempFolder folder;
  write_file(folder / "empty", "");
  CHECK_THROWS_WITH(MappedFile::open(folder / "none"), Contains("No such file"));
  CHECK_THROWS_WITH(MappedFile::open(folder / "empty"), Contains("is empty"));
  CHECK_THROWS_WITH(MappedFile::open(folder.path()), Contains("not a regular file"));
}

TEST_CASE("files and folders are as readable and writable as the umask allows") {
  const TempFolder folder;
  const mode_t before = ::umask(0002);
  WholeFile file(folder / "file", false);
  file.write("x");
  file.commit();
  StagedFolder staged(folder / "folder", false);
  OutputFile(staged.path() / "inside").finish();
  staged.commit();
  ::umask(before);
  const auto mode = [&](const char* name) { return static_cast<unsigned>(fs::status(folder / name).permissions()); };
  CHECK(mode("file") == 0664);
  CHECK(mode("folder") == 0775);
  CHECK(mode("folder/inside") == 0664);
}

TEST_CASE("JSON of a name that is not UTF-8 is written with U+FFFD in its place") {
  CHECK(to_text(Json{{"path", "bad\xffname"}}) == "{\"path\":\"bad\uFFFDname\"}");
}

TEST_CASE("JSON errors name the file and the line") {
  CHECK_THROWS_WITH(parse_json("{\n\"a\": 1,\n}", "config", "x.json"),
                    "[config] x.json: is not JSON (line 3); download or copy the file again.");
  CHECK_THROWS_WITH(parse_json("{\"a\": NaN}", "config", "x.json"), Contains("has NaN, which is not valid JSON"));
  CHECK_THROWS_WITH(parse_json(std::string(100'000, '['), "config", "x.json"),
                    Contains("nested deeper than 64 levels"));
  CHECK_THROWS_WITH(parse_json("{\"a\": 1e999}", "config", "x.json"), Contains("x.json"));
}

}  // namespace core_test
