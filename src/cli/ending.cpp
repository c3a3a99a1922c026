#include "cli/ending.h"

#include <CLI/CLI.hpp>

#include "core/error.h"

namespace tapetune::cli {

namespace {

// fail() makes one line, a recipe has one for each mistake; what others throw may have many.
std::string one_line(std::string text) {
  for (char& c : text) {
    if (c == '\n' || c == '\r') c = ' ';
  }
  return text;
}

}  // namespace

Ending ending(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const CLI::ParseError& error) {
    return {one_line(fmt::format("[usage] {}; see tapetune --help", error.what())), bad_usage};
  } catch (const Interrupted& error) {
    return {one_line(error.what()), resumable};
  } catch (const Error& error) {
    return {error.what(), bad_input};
  } catch (const c10::Error& error) {
    return {one_line(fmt::format("[torch] {}", error.what_without_backtrace())), bad_input};
  } catch (const std::bad_alloc&) {
    return {"[memory] there is not enough memory; use a shorter sequence or a smaller model", bad_input};
  } catch (const std::exception& error) {
    return {one_line(fmt::format("[internal] {}", error.what())), bad_input};
  }
}

}  // namespace tapetune::cli
