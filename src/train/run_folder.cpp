#include "train/run_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <charconv>
#include <cstring>

#include "core/digits.h"
#include "core/error.h"
#include "core/file.h"
#include "core/moment.h"

namespace tapetune {

namespace {

namespace fs = std::filesystem;

constexpr std::string_view step_prefix = "step-";

std::string step_name(std::int64_t step) { return fmt::format("{}{:08}", step_prefix, step); }

std::optional<std::int64_t> step_in(const std::string& name) {
  if (!name.starts_with(step_prefix)) return std::nullopt;
  std::int64_t step = 0;
  const char *begin = name.data() + step_prefix.size(), *end = name.data() + name.size();
  const auto [rest, error] = std::from_chars(begin, end, step);
  return error == std::errc() && rest == end ? std::optional(step) : std::nullopt;
}

void require_same(const Recipe& before, const Recipe& now, const fs::path& run) {
  std::string keys;
  for (const RecipeDifference& d : differences(before, now)) {
    if (!d.decides) continue;
    keys += fmt::format("{}{} ({} there, {} now{})", keys.empty() ? "" : ", ", d.key, d.before, d.after,
                        d.key == "steps" ? "; only a constant schedule can be extended" : "");
  }
  if (keys.empty()) return;
  fail("train",
       "{}: contains a run of another recipe, which differs in {}; choose another run folder, or remove this one.",
       run.string(), keys);
}

}  // namespace

void RunFolder::require_fits(const Recipe& recipe) {
  const fs::path file = fs::path(recipe.run) / "recipe.yaml";
  std::error_code status;
  if (fs::exists(file, status)) require_same(read_recipe(file), recipe, recipe.run);
  if (const auto latest = latest_in(recipe.run); latest && latest->step > recipe.steps) {
    fail("train", "{}: has trained {} already, but steps={}; give at least {}, or choose another run folder.",
         recipe.run, counted(latest->step, "step"), recipe.steps, latest->step);
  }
}

RunFolder::RunFolder(const Recipe& recipe, const std::vector<std::string>& comments) : path_(recipe.run) {
  std::error_code status;
  fs::create_directories(path_ / "checkpoints", status);
  if (status) fail("train", "{}: cannot be created: {}; choose another run folder.", path_.string(), status.message());
  const fs::path lock = path_ / "lock";
  lock_ = ::open(lock.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (lock_ < 0) {
    fail("train", "{}: cannot be written: {}; choose another run folder.", lock.string(), std::strerror(errno));
  }
  if (::flock(lock_, LOCK_EX | LOCK_NB) != 0) {
    ::close(lock_);
    fail("train", "{}: another process is training in this run folder; wait for it, or choose another.",
         path_.string());
  }
  // Who it is, for people and for tools that want to stop it.
  const std::string number = fmt::format("{}\n", ::getpid());
  if (::ftruncate(lock_, 0) != 0 || ::pwrite(lock_, number.data(), number.size(), 0) < 0) {
    ::close(lock_);
    fail("train", "{}: cannot be written: {}; choose another run folder.", lock.string(), std::strerror(errno));
  }
  try {
    require_fits(recipe);
    WholeFile out(path_ / "recipe.yaml", true);
    out.write(recipe_yaml(recipe, comments));
    out.commit();
    // Nobody else is here, so what is half-written was left by a run that was killed.
    for (const auto& entry : fs::directory_iterator(path_ / "checkpoints")) {
      if (!step_in(entry.path().filename().string())) fs::remove_all(entry.path(), status);
    }
    for (const auto& entry : fs::directory_iterator(path_ / "data", status)) {
      if (entry.path().filename().string().find(".partial-") != std::string::npos) fs::remove(entry.path(), status);
    }
    for (const auto& entry : fs::directory_iterator(path_)) {
      const std::string name = entry.path().filename().string();
      if (name.starts_with(".recipe.yaml.partial-") || name.starts_with(".inputs.json.partial-") ||
          name.starts_with(".machines.json.partial-")) {
        fs::remove(entry.path(), status);
      }
    }
  } catch (...) {
    ::close(lock_);
    throw;
  }
}

RunFolder::~RunFolder() { ::close(lock_); }

std::optional<std::int64_t> RunFolder::step_of(const fs::path& checkpoint) {
  return step_in(checkpoint.filename().string());
}

std::vector<RunFolder::Saved> RunFolder::all_in(const fs::path& run) {
  std::vector<Saved> found;
  std::error_code absent;
  for (const auto& entry : fs::directory_iterator(run / "checkpoints", absent)) {
    if (const auto step = step_in(entry.path().filename().string())) found.push_back({*step, entry.path()});
  }
  std::sort(found.begin(), found.end(), [](const Saved& a, const Saved& b) { return a.step < b.step; });
  return found;
}

std::optional<RunFolder::Saved> RunFolder::latest_in(const fs::path& run) {
  const std::vector<Saved> found = all_in(run);
  return found.empty() ? std::nullopt : std::optional(found.back());
}

void RunFolder::save(std::int64_t step, std::int64_t keep, const std::function<void(const fs::path&)>& write) const {
  StagedFolder staged(path_ / "checkpoints" / step_name(step), /*replace=*/true);
  write(staged.path());
  staged.commit();
  const std::vector<Saved> found = all_in(path_);
  std::error_code ignored;
  for (std::size_t i = 0; i + static_cast<std::size_t>(std::max<std::int64_t>(1, keep)) < found.size(); ++i) {
    // Out of sight first: a kill while its files go one by one must not leave a part that looks like a checkpoint.
    const fs::path going = path_ / "checkpoints" / fmt::format(".{}.removed", step_name(found[i].step));
    fs::rename(found[i].folder, going, ignored);
    at_moment("remove");
    fs::remove_all(ignored ? found[i].folder : going, ignored);
  }
}

}  // namespace tapetune
