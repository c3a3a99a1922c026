#include "run/disk.h"

#include <filesystem>

#include "adapters/peft.h"
#include "core/digits.h"
#include "core/log.h"

namespace tapetune {

RunDisk run_disk(const AdaptedModel& adapted, const Recipe& recipe) {
  double trained = 0;
  for (const Parameter& p : adapted.parameters) trained += static_cast<double>(p.value.numel()) * sizeof(float);
  RunDisk disk;
  disk.adapter = static_cast<double>(adapter_bytes(adapted));
  disk.checkpoint = disk.adapter + 2 * trained;
  disk.most = disk.checkpoint * static_cast<double>(recipe.keep + 1) + disk.adapter;
  return disk;
}

void warn_of_small_disk(const RunDisk& disk, const Recipe& recipe) {
  namespace fs = std::filesystem;
  std::error_code status;
  const fs::space_info space = fs::space(recipe.run, status);
  if (status) return;
  double there = 0;  // of earlier steps, which will go
  for (const char* part : {"checkpoints", "adapter"}) {
    for (const auto& entry : fs::recursive_directory_iterator(fs::path(recipe.run) / part, status)) {
      std::error_code gone;
      const auto size = entry.is_regular_file(gone) ? entry.file_size(gone) : 0;
      if (!gone) there += static_cast<double>(size);
    }
  }
  const double needed = disk.most - there;
  if (static_cast<double>(space.available) >= needed) return;
  warn("{}: checkpoints and adapter will need {}, but the disk has {} left; free some space, or set a smaller keep.",
       recipe.run, bytes_text(needed), bytes_text(static_cast<double>(space.available)));
}

}  // namespace tapetune
