// Moments at which a test may stop the program, so that a kill hits them on any machine.
#pragma once

#include <string_view>

namespace tapetune {

// Stops this process (SIGSTOP) when TAPETUNE_STOP_AT is "NAME:N" and this is the N-th time that NAME is reached.
// Moments: "file" a file is on disk, "commit" a result is about to get its name, "committed" it has it, "step" a
// training step is done, "replaced" an old folder is moved away and the new one not yet in its place (only where the
// file system cannot exchange names), "saving" a part of a checkpoint is written, "remove" an old checkpoint is out of
// sight but not removed.
void at_moment(std::string_view name);

}  // namespace tapetune
