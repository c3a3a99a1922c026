// Ctrl-C and SIGTERM ask for an end; long loops look now and then and stop where nothing is lost.
#pragma once

namespace tapetune {

void catch_signals();
bool interrupted();
// Throws Interrupted when a signal came.
void check_interrupted();

}  // namespace tapetune
