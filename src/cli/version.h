// What --version prints.
#pragma once

#include <string>

namespace tapetune::cli {

// Version, git commit, LibTorch, and the devices that this build computes on.
std::string version_text();

}  // namespace tapetune::cli
