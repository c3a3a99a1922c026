// Ctrl-C, SIGTERM and SIGHUP ask for an end; long loops look now and then and stop where nothing is lost.
#pragma once

#include <csignal>
#include <string_view>

namespace tapetune {

// SIGHUP only where it was not ignored (nohup). A second Ctrl-C ends at once; a second SIGTERM or SIGHUP changes
// nothing, because launchers, service managers and shells send them to processes that are already saving.
void catch_signals();
bool interrupted();
// For a process whose children do the work: from now on a second Ctrl-C is counted and does not end it.
void count_interrupts();
int interrupt_count();
// Throws Interrupted when a signal came.
void check_interrupted();

// While one of these lives, signals that ask for an end wait, also for a program that this process starts: it gets them
// when it catches signals itself.
class BlockSignals {
 public:
  BlockSignals();
  ~BlockSignals();
  BlockSignals(const BlockSignals&) = delete;
  BlockSignals& operator=(const BlockSignals&) = delete;

 private:
  sigset_t before_;
};

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
