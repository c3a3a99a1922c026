// An output on its way: under a name of its own beside its target, owned by a lock for as long as its process lives.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

namespace tapetune {

class Partial {
 public:
  enum class Kind { file, folder };

  // Creates `.NAME.partial-RANDOM` beside the target and locks it.
  Partial(const std::filesystem::path& target, Kind kind);
  ~Partial();  // removes it unless it was put in place
  Partial(const Partial&) = delete;
  Partial& operator=(const Partial&) = delete;

  const std::filesystem::path& path() const { return path_; }
  int descriptor() const { return descriptor_; }
  // Renames it to the target. Returns false, and keeps it, where the target exists and may not be replaced. A folder
  // that was replaced is what path() names afterwards, and goes with this object.
  bool place(bool replace);

 private:
  bool place_file(bool replace);
  bool place_folder(bool replace);
  bool place_folder_in_steps(bool replace);
  void rename_to_target(const std::filesystem::path& from) const;

  std::filesystem::path target_, path_;  // path_ empty: nothing to remove
  Kind kind_;
  int descriptor_ = -1;
};

// The target's name (its first 200 bytes) in the name of a partial; none: it is not one. Earlier versions put the
// number of their process where the random digits are, and locked nothing: remove_abandoned leaves those.
std::optional<std::string> partial_target(std::string_view name);

// Removes the partials in a folder that no process holds; with a name, only those of this target. Where a kill came
// between the two renames that replace a folder (see Partial::place), the old folder gets its name back.
void remove_abandoned(const std::filesystem::path& folder, std::string_view name = {});

}  // namespace tapetune
