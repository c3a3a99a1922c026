// Moments at which a test may stop the program, so that a kill hits them on any machine.
#pragma once

#include <string_view>

namespace tapetune {

// Stops this process (SIGSTOP) when TAPETUNE_STOP_AT is "NAME:N" and this is the N-th time that NAME is reached:
//   batch      a batch of text is about to be tokenized
//   commit     a result is about to get its name
//   committed  it has its name
//   file       a file of a result is on disk
//   fork       launch is about to start a rank
//   hash       a part of the base model is hashed
//   mapped     a file is mapped and not read yet
//   meet       a rank is about to meet the others
//   met        it has met them
//   rank       a process that launch started is about to become a rank
//   remove     an old checkpoint is out of sight, but not removed
//   replaced   an old folder is moved away and the new one not yet in its place (where names cannot be exchanged)
//   resume     the last checkpoint is about to be read
//   saving     a part of a checkpoint is written
//   start      the program has begun and does not catch signals yet
//   step       a training step is done
//   tensor     a tensor of a model is about to be written
void at_moment(std::string_view name);

}  // namespace tapetune
