#include "run/run_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <charconv>
#include <cstring>
#include <fstream>

#include "checkpoint/checkpoint.h"
#include "checkpoint/finite.h"
#include "core/digits.h"
#include "core/error.h"
#include "core/file.h"
#include "core/log.h"
#include "core/moment.h"
#include "core/partial.h"
#include "run/checkpoint_files.h"

namespace tapetune {

namespace {

namespace fs = std::filesystem;

constexpr std::string_view step_prefix = "step-", removed_mark = ".removed";
// The first line of a run's recipe.yaml. A user's own recipe may begin with "# tapetune train ...", a copy of this file
// has no lock beside it.
constexpr std::string_view run_mark = "# written by tapetune train, which keeps this run's recipe here";
// What a run writes besides; train.log is only appended to, and the token files in data/ have records of their own.
constexpr const char* run_names[] = {"recipe.yaml", "checkpoints", "metrics.jsonl",
                                     "adapter",     "inputs.json", "machines.json"};

std::string step_name(std::int64_t step) { return fmt::format("{}{:08}", step_prefix, step); }

std::optional<std::int64_t> step_in(const std::string& name) {
  if (!name.starts_with(step_prefix)) return std::nullopt;
  std::int64_t step = 0;
  const char *begin = name.data() + step_prefix.size(), *end = name.data() + name.size();
  const auto [rest, error] = std::from_chars(begin, end, step);
  return error == std::errc() && rest == end ? std::optional(step) : std::nullopt;
}

std::string first_line(const fs::path& file) {
  std::string line(256, '\0');
  std::ifstream in(file, std::ios::binary);
  in.read(line.data(), static_cast<std::streamsize>(line.size()));
  line.resize(static_cast<std::size_t>(in.gcount()));
  return line.substr(0, line.find('\n'));
}

// Earlier versions began recipe.yaml with "# tapetune 0.1.0" and nothing else in that line.
bool is_earlier_mark(std::string_view line) {
  constexpr std::string_view begin = "# tapetune ";
  if (!line.starts_with(begin)) return false;
  const std::string_view version = line.substr(begin.size());
  return !version.empty() && version.find_first_not_of("0123456789.") == std::string_view::npos;
}

// The process number that a run writes, or nothing yet.
bool is_lock(const fs::path& file) {
  std::error_code status;
  if (!fs::is_regular_file(fs::symlink_status(file, status))) return false;
  return first_line(file).find_first_not_of("0123456789") == std::string::npos;
}

// The name under which a checkpoint is removed: out of sight first.
std::string removed_name(std::string_view checkpoint) { return fmt::format(".{}{}", checkpoint, removed_mark); }

// What a file or folder that was left half-written, or half-removed, was to be; empty: it is neither.
std::string unfinished_target(std::string_view name) {
  if (auto target = partial_target(name)) return *target;
  const bool removed = name.starts_with('.') && name.ends_with(removed_mark);
  return removed ? std::string(name.substr(1, name.size() - 1 - removed_mark.size())) : "";
}

// What a killed run left half-written, by the names that a run gives to such files; all else is somebody's. Also what
// remove_abandoned leaves: partials of earlier versions, and all of them where the file system has no locks.
void remove_partials(const fs::path& run) {
  const auto remove_in = [](const fs::path& folder, const std::function<bool(const std::string&)>& ours) {
    std::error_code status;
    std::vector<fs::path> going;
    for (const auto& entry : fs::directory_iterator(folder, status)) {
      const std::string target = unfinished_target(entry.path().filename().string());
      if (!target.empty() && ours(target)) going.push_back(entry.path());
    }
    for (const fs::path& path : going) fs::remove_all(path, status);
  };
  remove_in(run / "checkpoints", [](const std::string& target) { return step_in(target).has_value(); });
  remove_in(run / "data",
            [](const std::string& target) { return target.ends_with(".tokens") || target.ends_with(".tokens.json"); });
  remove_in(run, [](const std::string& target) {
    return target == "recipe.yaml" || target == "inputs.json" || target == "machines.json";
  });
}

// A start that was cut off: nothing of it is to be kept.
bool is_empty_folder(const fs::path& folder) {
  std::error_code status;
  if (!fs::is_directory(folder, status)) return false;
  for (const auto& entry : fs::directory_iterator(folder, status)) {
    if (!step_in(unfinished_target(entry.path().filename().string()))) return false;
  }
  return !status;
}

bool is_there(const fs::path& path) {
  std::error_code status;
  return fs::exists(fs::symlink_status(path, status));
}

void require_same(const Recipe& before, const Recipe& now, const fs::path& run) {
  std::string keys;
  for (const RecipeDifference& d : differences(before, now)) {
    if (!d.affects_result) continue;
    keys += fmt::format("{}{} ({} there, {} now{})", keys.empty() ? "" : ", ", d.key, d.before, d.after,
                        d.key == "steps" ? "; only a constant schedule can be extended" : "");
  }
  if (keys.empty()) return;
  fail("train",
       "{}: contains a run of another recipe, which differs in {}; choose another run folder, or remove this one.",
       run.string(), keys);
}

}  // namespace

Recipe RunFolder::recipe_in(const fs::path& run, std::span<const std::string> overrides) {
  Recipe recipe = read_recipe(run / "recipe.yaml", overrides);
  if (recipe.version1) recipe.method.window = false;
  return recipe;
}

Recipe RunFolder::as_begun(Recipe recipe) {
  std::error_code status;
  if (is_marked(recipe.run) && recipe_in(recipe.run).version1) recipe.method.window = false;
  return recipe;
}

bool RunFolder::is_marked(const fs::path& run) {
  std::error_code status;
  if (!fs::is_regular_file(run / "recipe.yaml", status)) return false;
  const std::string line = first_line(run / "recipe.yaml");
  if (line != run_mark && !is_earlier_mark(line)) return false;
  // A copy of a run's recipe is a user's own. Some remove a lock that they think is left over.
  const std::vector<Saved> saved = all_in(run);
  return is_lock(run / "lock") || std::any_of(saved.begin(), saved.end(), [&](const Saved& each) {
           return fs::exists(each.folder / "state.json", status);
         });
}

void RunFolder::require_ours(const fs::path& run) {
  if (is_marked(run)) return;
  const auto refuse = [&](const std::string& name) {
    fail("train",
         "{}: has {}, which no training run wrote and which this one would overwrite; nothing was changed. Choose "
         "another run folder, for example run={}.",
         run.string(), name, (run / "run").string());
  };
  for (const char* name : run_names) {
    if (is_there(run / name) && !(std::string_view(name) == "checkpoints" && is_empty_folder(run / name))) refuse(name);
  }
  if (is_there(run / "lock") && !is_lock(run / "lock")) refuse("lock");
  std::error_code absent;
  for (const auto& entry : fs::directory_iterator(run, absent)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("events.out.tfevents.") && name.ends_with(".tapetune")) refuse(name);
  }
}

void RunFolder::require_fits(const Recipe& recipe) {
  require_ours(recipe.run);
  const fs::path file = fs::path(recipe.run) / "recipe.yaml";
  std::error_code status;
  if (fs::exists(file, status)) require_same(recipe_in(recipe.run), as_begun(recipe), recipe.run);
  if (const auto latest = latest_in(recipe.run); latest && latest->step > recipe.steps) {
    fail("train", "{}: has trained {} already, but steps={}; give at least {}, or choose another run folder.",
         recipe.run, counted(latest->step, "step"), recipe.steps, latest->step);
  }
}

bool RunFolder::claim(const fs::path& run) {
  std::error_code status;
  fs::create_directories(run, status);
  if (status) fail("train", "{}: cannot be created: {}; choose another run folder.", run.string(), status.message());
  const bool fresh = !is_there(run / "lock");
  const int lock = ::open((run / "lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
  if (lock < 0) {
    fail("train", "{}: cannot be written: {}; choose another run folder.", (run / "lock").string(), errno_text(errno));
  }
  ::close(lock);
  return fresh;
}

RunFolder::RunFolder(const Recipe& recipe, const std::string& version) : path_(recipe.run) {
  require_ours(path_);
  std::error_code status;
  fs::create_directories(path_, status);
  if (status) fail("train", "{}: cannot be created: {}; choose another run folder.", path_.string(), status.message());
  const fs::path lock = path_ / "lock";
  lock_ = ::open(lock.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
  if (lock_ < 0) {
    fail("train", "{}: cannot be written: {}; choose another run folder.", lock.string(), errno_text(errno));
  }
  if (::flock(lock_, LOCK_EX | LOCK_NB) != 0) {
    const int error = errno;
    if (error == EWOULDBLOCK) {
      ::close(lock_);
      fail("train", "{}: another process is training in this run folder; wait for it, or choose another.",
           path_.string());
    }
    // Some network file systems have no locks; refusing would make training there impossible.
    warn("{}: cannot be locked ({}); make sure that no other process trains in this run folder", lock.string(),
         errno_text(error));
  }
  try {
    // Who it is, for people and for tools that want to stop it.
    const std::string number = fmt::format("{}\n", ::getpid());
    if (::ftruncate(lock_, 0) != 0 || ::pwrite(lock_, number.data(), number.size(), 0) < 0) {
      fail("train", "{}: cannot be written: {}; choose another run folder.", lock.string(), errno_text(errno));
    }
    fs::create_directories(path_ / "checkpoints", status);
    if (status)
      fail("train", "{}: cannot be created: {}; choose another run folder.", path_.string(), status.message());
    require_fits(recipe);
    WholeFile out(path_ / "recipe.yaml", true);
    const std::string comments[] = {std::string(run_mark.substr(2)), fmt::format("tapetune {}", version)};
    out.write(recipe_yaml(recipe, comments));
    out.commit();
    // Nobody else is here, so what is half-written was left by a run that was killed.
    remove_abandoned(path_ / "checkpoints");
    remove_abandoned(path_);
    remove_partials(path_);
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
    const auto step = step_in(entry.path().filename().string());
    std::error_code gone;
    if (step && entry.is_directory(gone)) found.push_back({*step, entry.path()});
  }
  std::sort(found.begin(), found.end(), [](const Saved& a, const Saved& b) { return a.step < b.step; });
  return found;
}

std::optional<RunFolder::Saved> RunFolder::latest_in(const fs::path& run) {
  const std::vector<Saved> found = all_in(run);
  return found.empty() ? std::nullopt : std::optional(found.back());
}

std::optional<RunFolder::Saved> RunFolder::latest_undamaged() const {
  std::vector<Saved> found = all_in(path_);
  std::vector<std::pair<Saved, std::string>> damaged;
  while (!found.empty()) {
    std::string damage = damage_of(found.back().folder);
    if (damage.empty()) break;
    damaged.emplace_back(std::move(found.back()), std::move(damage));
    found.pop_back();
  }
  if (damaged.empty()) return found.empty() ? std::nullopt : std::optional(found.back());
  if (found.empty()) {
    fail(
        "train",
        "{}: is damaged: {}; there is no earlier checkpoint to resume from: restore this one from a copy, or remove it "
        "to train from the beginning.",
        damaged.front().first.folder.string(), damaged.front().second);
  }
  for (const auto& [saved, damage] : damaged) {
    // Under its name it would count as the newest, and `keep` would remove good ones for it.
    fs::path aside = saved.folder.string() + ".damaged";
    for (int i = 2; is_there(aside); ++i) aside = fmt::format("{}.damaged-{}", saved.folder.string(), i);
    std::error_code status;
    fs::rename(saved.folder, aside, status);
    if (status) {
      fail("train", "{}: is damaged: {}; it cannot be renamed: {}; move it away to resume from step {}.",
           saved.folder.string(), damage, status.message(), found.back().step);
    }
    warn("{}: is damaged: {}; resuming from step {} instead, and keeping the damaged checkpoint as {}",
         saved.folder.string(), damage, found.back().step, aside.filename().string());
  }
  return found.back();
}

std::optional<RunFolder::Saved> RunFolder::latest_finite() const {
  std::vector<Saved> found = all_in(path_);
  for (; !found.empty(); found.pop_back()) {
    try {
      StoredTensors stored;
      map_safetensors(found.back().folder / "adapter_model.safetensors", stored);
      if (std::all_of(stored.begin(), stored.end(),
                      [](const auto& each) { return all_finite(tensor_from(each.second)); })) {
        return found.back();
      }
    } catch (const Error&) {  // one that cannot be read is no good one
    }
  }
  return std::nullopt;
}

void RunFolder::save(std::int64_t step, std::int64_t keep, const std::function<void(const fs::path&)>& write) const {
  StagedFolder staged(path_ / "checkpoints" / step_name(step), /*replace=*/true);
  write(staged.path());
  write_hashes(staged.path());
  staged.commit();
  const std::vector<Saved> found = all_in(path_);
  std::error_code ignored;
  for (std::size_t i = 0; i + static_cast<std::size_t>(std::max<std::int64_t>(1, keep)) < found.size(); ++i) {
    // Out of sight first: a kill while its files go one by one must not leave a part that looks like a checkpoint.
    const fs::path going = path_ / "checkpoints" / removed_name(step_name(found[i].step));
    fs::rename(found[i].folder, going, ignored);
    at_moment("remove");
    fs::remove_all(ignored ? found[i].folder : going, ignored);
  }
}

}  // namespace tapetune
