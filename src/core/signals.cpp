#include "core/signals.h"

#include <csignal>

#include "core/error.h"

namespace tapetune {

namespace {

volatile std::sig_atomic_t signal_seen = 0;
int holds = 0;

extern "C" void on_signal(int number) {
  signal_seen = number;
  std::signal(number, SIG_DFL);  // a second Ctrl-C ends at once
}

}  // namespace

void catch_signals() {
  struct sigaction action{};
  action.sa_handler = on_signal;  // without SA_RESTART: a read that waits for input ends too
  ::sigaction(SIGINT, &action, nullptr);
  ::sigaction(SIGTERM, &action, nullptr);
  std::signal(SIGXFSZ, SIG_IGN);  // a file-size limit is an error of write(), like a full disk
}

bool interrupted() { return signal_seen != 0; }

void check_interrupted() {
  if (holds == 0 && interrupted()) throw Interrupted("interrupted; nothing half-written is left behind");
}

HoldInterrupts::HoldInterrupts() { ++holds; }
HoldInterrupts::~HoldInterrupts() { --holds; }

}  // namespace tapetune
