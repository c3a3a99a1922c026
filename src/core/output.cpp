#include "core/output.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>

#include "core/error.h"
#include "core/escape.h"

namespace tapetune {

namespace {

std::atomic<bool> pipes_end_program = true;

[[noreturn]] void fail_output(int error) {
  if (error == EPIPE && pipes_end_program) {
    std::signal(SIGPIPE, SIG_DFL);
    std::raise(SIGPIPE);
  }
  fail("output", "standard output cannot be written: {}; check where it goes.", errno_text(error));
}

}  // namespace

void keep_standard_streams() {
  for (int stream = STDIN_FILENO; stream <= STDERR_FILENO; ++stream) {
    // The lowest number that is free. Only for reading, so that writing is the error that it was.
    if (::fcntl(stream, F_GETFD) < 0 && errno == EBADF) ::open("/dev/null", O_RDONLY);
  }
}

void write_error(std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return;
    text.remove_prefix(static_cast<std::size_t>(written));
  }
}

void write_out(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size()) fail_output(errno);
}

void write_text(std::string_view text) {
  static const bool terminal = ::isatty(STDOUT_FILENO) != 0;
  if (terminal) {
    write_out(printable_lines(text));
  } else {
    write_out(text);
  }
}

void flush_out() {
  errno = 0;
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) fail_output(errno != 0 ? errno : EIO);
}

void report_closed_pipes() { pipes_end_program = false; }

void print_escaped(std::string_view text) { write_out(printable_lines(text)); }

}  // namespace tapetune
