// How many cores this process may use.
#pragma once

#include <filesystem>

namespace tapetune {

// The cores of the process's affinity mask, at most the CPU quota of its cgroup and of the cgroups above (docker
// --cpus, Kubernetes limits) rounded up; at least 1. The paths are the kernel's, others in tests.
int available_cores(const std::filesystem::path& membership = "/proc/self/cgroup",
                    const std::filesystem::path& mount = "/sys/fs/cgroup");

}  // namespace tapetune
