// The layout of --help: one column for names, one for what they do, 80 columns in all.
#pragma once

#include <string>

#include <CLI/CLI.hpp>

namespace tapetune::cli {

class HelpPage : public CLI::FormatterBase {
 public:
  std::string make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const override;
};

}  // namespace tapetune::cli
