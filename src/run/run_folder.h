// The folder of a training run: its recipe, its metrics, and checkpoints that are whole or absent.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "recipe/recipe.h"

namespace tapetune {

class RunFolder {
 public:
  // Makes it, or takes up a run that was begun. Fails when another process trains there, when it cannot be written,
  // when it has files of others under names that a run writes, and when it belongs to another recipe, naming the keys
  // that differ. `version` of tapetune opens its recipe.yaml.
  RunFolder(const Recipe& recipe, const std::string& version);
  // Fails, naming the first, where a name that a run writes is there and no run wrote it; changes nothing.
  static void require_ours(const std::filesystem::path& run);
  // The same, and fails where the folder holds a run of another recipe.
  static void require_fits(const Recipe& recipe);
  // The recipe of a run, and a given recipe with what a run of version 1 in its folder decided: that one knew no
  // sliding windows, and goes on without.
  static Recipe recipe_in(const std::filesystem::path& run, std::span<const std::string> overrides = {});
  static Recipe as_begun(Recipe recipe);
  // Whether a run wrote this folder's recipe.yaml.
  static bool is_marked(const std::filesystem::path& run);
  // Makes the folder and the lock file that marks it as a run's, before anything else is in it. True if the lock is
  // new.
  static bool claim(const std::filesystem::path& run);
  ~RunFolder();
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }

  struct Saved {
    std::int64_t step = 0;
    std::filesystem::path folder;
  };
  // The newest; none in a run that has not come so far.
  std::optional<Saved> latest() const { return latest_in(path_); }
  // The newest whose files are undamaged. Damaged ones after it are named in a warning and renamed to step-N.damaged;
  // fails where there are only such.
  std::optional<Saved> latest_undamaged() const;
  // The newest whose parameters have neither NaN nor Inf.
  std::optional<Saved> latest_finite() const;
  // The newest of a folder that another process may be training in.
  static std::optional<Saved> latest_in(const std::filesystem::path& run);
  static std::vector<Saved> all_in(const std::filesystem::path& run);  // oldest first
  // N of a folder called step-N.
  static std::optional<std::int64_t> step_of(const std::filesystem::path& checkpoint);
  // `write` fills the folder, to which the hashes of its files are added; then all but the newest `keep` are removed.
  void save(std::int64_t step, std::int64_t keep, const std::function<void(const std::filesystem::path&)>& write) const;

 private:
  std::filesystem::path path_;
  int lock_ = -1;
};

}  // namespace tapetune
