#include <sys/wait.h>
#include <unistd.h>

#include <fstream>

#include "catch.h"
#include "core/cores.h"
#include "core/error.h"
#include "core/file.h"
#include "core/json.h"
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

TEST_CASE("what a killed writer left is removed by the next, what a live one writes is not") {
  const TempFolder folder;
  const pid_t dead = ::fork();
  if (dead == 0) ::_exit(0);
  int status = 0;
  ::waitpid(dead, &status, 0);
  const fs::path stale = folder / fmt::format(".out.partial-{}", dead),
                 live = folder / fmt::format(".out.partial-{}", ::getppid());
  fs::create_directory(stale);
  fs::create_directory(live);
  const StagedFolder staged(folder / "out", false);
  CHECK_FALSE(fs::exists(stale));
  CHECK(fs::exists(live));
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

TEST_CASE("files of a killed writer that had our process number are not taken over") {
  const TempFolder folder;
  const fs::path stale = folder / fmt::format(".out.partial-{}", ::getpid());
  fs::create_directory(stale);
  write_file(stale / "junk", "junk");
  StagedFolder staged(folder / "out", false);
  CHECK(fs::is_empty(staged.path()));
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

TEST_CASE("JSON errors name the file and the line") {
  CHECK_THROWS_WITH(parse_json("{\n\"a\": 1,\n}", "config", "x.json"),
                    "[config] x.json: is not JSON (line 3); download or copy the file again.");
  CHECK_THROWS_WITH(parse_json("{\"a\": NaN}", "config", "x.json"), Contains("has NaN, which is not valid JSON"));
  CHECK_THROWS_WITH(parse_json(std::string(100'000, '['), "config", "x.json"),
                    Contains("nested deeper than 64 levels"));
  CHECK_THROWS_WITH(parse_json("{\"a\": 1e999}", "config", "x.json"), Contains("x.json"));
}

}  // namespace core_test
