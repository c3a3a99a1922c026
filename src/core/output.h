// Standard output for results, and standard error where it may be a terminal or a pipe that is gone.
#pragma once

#include <fmt/format.h>

#include <string_view>
#include <utility>

namespace tapetune {

// Before any file is opened: one that took the number of a closed stream would get the program's messages in it.
void keep_standard_streams();

// To standard error; what cannot be written is dropped, because nobody reads it.
void write_error(std::string_view text);

// To standard output, as it is. Fails where that cannot be written; a closed pipe ends the program as it ends others
// (SIGPIPE), so that `| head` is quiet.
void write_out(std::string_view text);
// Text of a file or a model: as it is, but on a terminal without control characters other than line feeds and tabs.
void write_text(std::string_view text);
// Writes what is still in the buffer.
void flush_out();
// From now on a closed pipe is an error like any other: other processes wait for this one.
void report_closed_pipes();

void print_escaped(std::string_view text);
// A message or a table to standard output; control characters that came from files are escaped.
template <typename... Args>
void print_out(fmt::format_string<Args...> text, Args&&... args) {
  print_escaped(fmt::format(text, std::forward<Args>(args)...));
}

}  // namespace tapetune
