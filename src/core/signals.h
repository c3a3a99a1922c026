// Ctrl-C and SIGTERM ask for an end; long loops look now and then and stop where nothing is lost.
#pragma once

namespace tapetune {

void catch_signals();
bool interrupted();
// Throws Interrupted when a signal came.
void check_interrupted();

// While one of these lives, check_interrupted does not throw: processes that compute together stop together, where they
// have agreed to.
class HoldInterrupts {
 public:
  HoldInterrupts();
  ~HoldInterrupts();
  HoldInterrupts(const HoldInterrupts&) = delete;
  HoldInterrupts& operator=(const HoldInterrupts&) = delete;
};

}  // namespace tapetune
