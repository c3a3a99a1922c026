#include "model/device.h"

#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <dlfcn.h>

#include <cstdlib>

#include "core/error.h"
#include "core/log.h"

namespace tapetune {

bool has_gpu(const std::filesystem::path& root) {
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (visible != nullptr && (std::string_view(visible).empty() || std::string_view(visible) == "-1")) return false;
  std::error_code status;
  return std::filesystem::exists(root / "dev/nvidia0", status) ||
         std::filesystem::exists(root / "proc/driver/nvidia", status);
}

at::Device open_device(const std::string& name, int local_rank) {
  if (name == "cpu") return at::kCPU;
  if (name == "cuda") return open_device(fmt::format("cuda:{}", local_rank));
  if (name == "auto") {
#ifdef TAPETUNE_CUDA
    if (at::hasCUDA() && at::detail::getCUDAHooks().getNumGPUs() > 0) return open_device("cuda", local_rank);
#else
    static bool told = false;
    if (has_gpu() && !std::exchange(told, true)) {
      note(
          "this machine has a GPU, but this build of tapetune computes on the CPU only: build it with tools/build "
          "cuda, "
          "or give --device cpu");
    }
#endif
    return at::kCPU;
  }
  const std::string number = name.size() > 5 ? name.substr(5) : "0";
  if (name.rfind("cuda", 0) != 0 || (name.size() > 4 && name[4] != ':') || number.size() > 2 ||
      number.find_first_not_of("0123456789") != std::string::npos) {
    fail("device", "{} is not a device; give auto, cpu, cuda or cuda:N.", name);
  }
  // The binary links only LibTorch's CPU half, so that it starts fast and runs anywhere. This must come before the
  // first question whether there is a GPU, because the answer is kept.
  if (::dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    fail("device", "{}: LibTorch's CUDA half cannot be loaded ({}); run tools/setup --full, or use --device cpu.", name,
         ::dlerror());
  }
  const int count = at::hasCUDA() ? at::detail::getCUDAHooks().getNumGPUs() : 0;
  if (std::stoi(number) >= count) {
    fail("device", "{}: this machine has {} usable GPU{}; use --device cpu.", name, count, count == 1 ? "" : "s");
  }
  return {at::kCUDA, static_cast<at::DeviceIndex>(std::stoi(number))};
}

}  // namespace tapetune
