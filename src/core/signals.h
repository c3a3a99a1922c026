// Ctrl-C and SIGTERM ask for an end; long loops look now and then and stop where nothing is lost.
#pragma once

#include <string_view>

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

// While it lives, the first signal prints a line on stderr at once, however long the work takes until it next looks.
class StopMessage {
 public:
  StopMessage() = default;
  ~StopMessage();
  StopMessage(const StopMessage&) = delete;
  StopMessage& operator=(const StopMessage&) = delete;

  // Replaces a progress bar where stderr is a terminal. The text is cut at 200 bytes.
  void set(std::string_view text);
  // Whether a signal has printed the line that is set now, and not one before it.
  bool was_printed() const;
};

}  // namespace tapetune
