// Moments at which a test may stop the program, so that a kill hits them on any machine.
#pragma once

#include <string_view>

namespace tapetune {

// Stops this process (SIGSTOP) when TAPETUNE_STOP_AT is "NAME:N" and this is the N-th time that NAME is reached.
// Moments: "file" a file is on disk, "commit" a result is about to get its name, "committed" it has it, "step" a
// training step is done, "saving" a part of a checkpoint is written, "remove" an old checkpoint is out of sight but not
// removed, "mapped" a file is mapped and not read yet, "fork" launch is about to start a rank, "rank" it is about to
// become one, "start" the program has begun and does not catch signals yet, "meet" a rank is about to meet the others,
// "met" it has, "resume" it is about to read the last checkpoint.
void at_moment(std::string_view name);

}  // namespace tapetune
