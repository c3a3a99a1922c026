#include "cli/version.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <fmt/format.h>
#include <torch/version.h>

#include "model/device.h"

namespace tapetune::cli {

namespace {

std::string cuda_text() {
#ifdef TAPETUNE_CUDA
  const int count = at::hasCUDA() ? at::detail::getCUDAHooks().getNumGPUs() : 0;
  return fmt::format("CUDA, {} GPU{} found", count, count == 1 ? "" : "s");
#else
  return fmt::format("built without CUDA{}", has_gpu() ? ", though this machine has a GPU (tools/build cuda)" : "");
#endif
}

}  // namespace

std::string version_text() {
  return fmt::format("tapetune {} (commit {})\nLibTorch {}\ndevices: CPU ({}, {} thread{}); {}", TAPETUNE_VERSION,
                     TAPETUNE_COMMIT, TORCH_VERSION, at::get_cpu_capability(), at::get_num_threads(),
                     at::get_num_threads() == 1 ? "" : "s", cuda_text());
}

}  // namespace tapetune::cli
