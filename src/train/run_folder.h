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
  // Makes it, or takes up a run that was begun. Fails when another process trains there, when it cannot be written, and
  // when it belongs to another recipe, naming the keys that differ. `comments` open its recipe.yaml.
  RunFolder(const Recipe& recipe, const std::vector<std::string>& comments);
  // Fails where the folder holds a run of another recipe; changes nothing.
  static void require_fits(const Recipe& recipe);
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
  // The same of a folder that another process may be training in.
  static std::optional<Saved> latest_in(const std::filesystem::path& run);
  // N of a folder called step-N.
  static std::optional<std::int64_t> step_of(const std::filesystem::path& checkpoint);
  // `write` fills the folder; then all but the newest `keep` are removed.
  void save(std::int64_t step, std::int64_t keep, const std::function<void(const std::filesystem::path&)>& write) const;

 private:
  static std::vector<Saved> all_in(const std::filesystem::path& run);  // oldest first
  std::filesystem::path path_;
  int lock_ = -1;
};

}  // namespace tapetune
