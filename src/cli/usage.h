// Wrong words on the command line: what they probably meant, and which help to read.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

namespace CLI {
class App;
class ParseError;
}  // namespace CLI

namespace tapetune::cli {

// The program ends with exit code 2.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// "help eval passkey" as the words that print it: "eval passkey --help". Other words stay as they are.
std::vector<std::string> expand_help(const CLI::App& app, std::vector<std::string> words);

// What to tell of an error of CLI11: its text or a better one, a hint, and the command whose help says more. `app` has
// parsed `words` as far as it could.
UsageError explain_usage(const CLI::App& app, const CLI::ParseError& error, const std::vector<std::string>& words);

// The command that these words begin with, "eval passkey" for one within another; fails where there is none. Options of
// the program may stand before it.
const CLI::App& find_command(const CLI::App& app, const std::vector<std::string>& words);

// "tapetune eval passkey"
std::string command_name(const CLI::App& command);

}  // namespace tapetune::cli
