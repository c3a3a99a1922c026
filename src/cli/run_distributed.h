// Commands that several processes can share, where a launcher started them.
#pragma once

#include <functional>
#include <string>

#include "distributed/world.h"

namespace CLI {
class App;
}

namespace tapetune::cli {

struct DistributedOptions {
  int timeout = 600;  // seconds
  std::string trace;
  std::string device = "auto";
};

void add_distributed(CLI::App& verb, DistributedOptions& options);
// Whether add_distributed was called for it.
bool shares_work(const CLI::App& verb);

// Calls `work` with the ranks that a launcher has started, or with this process alone. Only rank 0 speaks; where the
// work ends early, it says who is at fault, and all end.
void run_distributed(const DistributedOptions& options, const std::function<void(World& world)>& work);

}  // namespace tapetune::cli
