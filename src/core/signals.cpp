#include "core/signals.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <string>

#include "core/error.h"
#include "core/output.h"

namespace tapetune {

namespace {

volatile std::sig_atomic_t signal_seen = 0, ctrl_c_seen = 0, ctrl_c_counts = 0;
int holds = 0;

sigset_t ending_signals() {
  sigset_t all;
  ::sigemptyset(&all);
  for (const int number : {SIGINT, SIGTERM, SIGHUP}) ::sigaddset(&all, number);
  return all;
}

// The handler may run between any two instructions, so that a text is written where it does not look and then put in
// place. Two are enough: the handler prints one text once.
struct StopText {
  std::size_t size = 0;
  char bytes[256];
};
StopText stop_texts[2];
std::atomic<const StopText*> stop_text = nullptr, printed_text = nullptr;
static_assert(std::atomic<const StopText*>::is_always_lock_free);

extern "C" void on_signal(int number) {
  const int error = errno;
  const StopText* text = stop_text.load();
  if (signal_seen == 0 && text != nullptr && ::write(STDERR_FILENO, text->bytes, text->size) < 0) {
    // Nobody listens; the work stops all the same.
  }
  if (signal_seen == 0) printed_text = text;
  signal_seen = number;
  if (number == SIGINT) {
    ctrl_c_seen = ctrl_c_seen + 1;
    if (ctrl_c_counts == 0) std::signal(number, SIG_DFL);
  }
  errno = error;
}

}  // namespace

void catch_signals() {
  struct sigaction action{};
  action.sa_handler = on_signal;  // without SA_RESTART: a read that waits for input ends too
  ::sigaction(SIGINT, &action, nullptr);
  ::sigaction(SIGTERM, &action, nullptr);
  struct sigaction before{};
  ::sigaction(SIGHUP, nullptr, &before);
  if (before.sa_handler != SIG_IGN) ::sigaction(SIGHUP, &action, nullptr);
  std::signal(SIGXFSZ, SIG_IGN);  // a file-size limit is an error of write(), like a full disk
  // So is a reader that is gone; core/output.h ends programs whose results nobody reads, unless their parent ignores
  // it.
  if (std::signal(SIGPIPE, SIG_IGN) == SIG_IGN) report_closed_pipes();
  const sigset_t all = ending_signals();
  ::pthread_sigmask(SIG_UNBLOCK, &all, nullptr);  // whoever started this may have held them back until now
}

void count_interrupts() { ctrl_c_counts = 1; }
int interrupt_count() { return ctrl_c_seen; }

BlockSignals::BlockSignals() {
  const sigset_t all = ending_signals();
  ::pthread_sigmask(SIG_BLOCK, &all, &before_);
}
BlockSignals::~BlockSignals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

bool interrupted() { return signal_seen != 0; }

void check_interrupted() {
  if (holds == 0 && interrupted()) throw Interrupted("interrupted; no partial files were left");
}

HoldInterrupts::HoldInterrupts() { ++holds; }
HoldInterrupts::~HoldInterrupts() { --holds; }

StopMessage::~StopMessage() { stop_text = nullptr; }

bool StopMessage::was_printed() const { return interrupted() && printed_text.load() == stop_text.load(); }

void StopMessage::set(std::string_view text) {
  constexpr std::size_t longest = 200;
  if (interrupted()) {
    stop_text = nullptr;  // said already, and that text must stay what was printed
    return;
  }
  StopText& next = stop_text.load() == &stop_texts[0] ? stop_texts[1] : stop_texts[0];
  const std::string line =
      (::isatty(STDERR_FILENO) != 0 ? "\r\033[K" : "") + std::string(text.substr(0, longest)) + "\n";
  next.size = line.size();
  std::memcpy(next.bytes, line.data(), line.size());
  stop_text = &next;
}

}  // namespace tapetune
