#include "core/cores.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <string>
#include <thread>

namespace tapetune {

namespace {

namespace fs = std::filesystem;

double quota_cores(double quota, double period) { return quota > 0 && period > 0 ? quota / period : HUGE_VAL; }

// cgroup v2: "max 100000" or "150000 100000". v1: one number a file, -1 for no limit.
double limit_in(const fs::path& folder) {
  double quota = 0, period = 0;
  if (std::ifstream both(folder / "cpu.max"); both >> quota >> period) return quota_cores(quota, period);
  std::ifstream one(folder / "cpu.cfs_quota_us"), other(folder / "cpu.cfs_period_us");
  return one >> quota && other >> period ? quota_cores(quota, period) : HUGE_VAL;
}

// The strictest limit of a cgroup and those above it. Inside a container the path may be the host's, and only the
// mount's root is there.
double strictest(const fs::path& mount, const std::string& group) {
  double least = limit_in(mount);
  for (fs::path below = fs::path(group).relative_path(); !below.empty(); below = below.parent_path()) {
    least = std::min(least, limit_in(mount / below));
  }
  return least;
}

}  // namespace

int available_cores(const fs::path& membership, const fs::path& mount) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  double cores = ::sched_getaffinity(0, sizeof allowed, &allowed) == 0
                     ? CPU_COUNT(&allowed)
                     : static_cast<double>(std::thread::hardware_concurrency());
  std::ifstream groups(membership);
  for (std::string line; std::getline(groups, line);) {  // "0::/path", or "4:cpu,cpuacct:/path"
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",",
                      group = line.substr(second + 1);
    if (controllers == ",,") cores = std::min(cores, strictest(mount, group));
    if (controllers.find(",cpu,") != std::string::npos) cores = std::min(cores, strictest(mount / "cpu", group));
  }
  return std::max(1, static_cast<int>(std::ceil(cores)));
}

}  // namespace tapetune
