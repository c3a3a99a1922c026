#include "cli/exit_code.h"

#include "cli/usage.h"
#include "core/digits.h"
#include "core/error.h"
#include "core/escape.h"
#include "core/log.h"
#include "core/output.h"

namespace tapetune::cli {

namespace {

// fail() makes one line, a recipe has one for each mistake; what others throw may have many.
std::string one_line(std::string text) {
  for (char& c : text) {
    if (c == '\n' || c == '\r') c = ' ';
  }
  return text;
}

// Of an allocation that failed: LibTorch's text names the bytes, if anything does.
std::string out_of_memory(const std::string& what) {
  std::string asked;
  constexpr std::string_view before = "you tried to allocate ";
  if (const std::size_t at = what.find(before); at != std::string::npos) {
    const double bytes = std::strtod(what.c_str() + at + before.size(), nullptr);
    if (bytes > 0) asked = fmt::format(" ({} asked for)", bytes_text(bytes));
  }
  return fmt::format(
      "[memory] out of memory{}; training needs least with micro_batch=1 and checkpointing=full (tapetune plan tells "
      "what a recipe needs); beyond that use a shorter context, a smaller model or more memory",
      asked);
}

bool says_out_of_memory(const std::string& what) {
  return what.find("DefaultCPUAllocator") != std::string::npos || what.find("out of memory") != std::string::npos;
}

}  // namespace

ExitMessage exit_message(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const UsageError& error) {
    return {one_line(fmt::format("[usage] {}", error.what())), bad_usage};
  } catch (const Interrupted& error) {
    return {one_line(error.what()), resumable};
  } catch (const Error& error) {
    return {error.what(), bad_input};
  } catch (const c10::Error& error) {
    const std::string what = error.what_without_backtrace();
    if (says_out_of_memory(what)) return {out_of_memory(what), bad_input};
    return {one_line("[torch] " + what), bad_input};
  } catch (const std::bad_alloc&) {
    return {out_of_memory(""), bad_input};
  } catch (const std::exception& error) {
    return {one_line(fmt::format("[internal] {}", error.what())), bad_input};
  }
}

void tell(const ExitMessage& message) {
  if (message.text.empty()) return;
  if (message.code == resumable) {
    write_error(printable(message.text) + "\n");
  } else {
    log_error(message.text);
  }
}

}  // namespace tapetune::cli
