#include "distributed/gloo.h"

#define USE_C10D_GLOO
#include <gloo/common/error.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <cstdlib>

namespace tapetune {

c10::intrusive_ptr<c10d::Backend> connect_gloo(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                               const std::string& address, std::chrono::milliseconds timeout) {
  const auto options = c10d::ProcessGroupGloo::Options::create(timeout);
  const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
  options->devices.push_back(interface != nullptr ? c10d::ProcessGroupGloo::createDeviceForInterface(interface)
                                                  : c10d::ProcessGroupGloo::createDeviceForHostname(address));
  return c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, options);
}

bool is_gloo_error(const std::exception& error) {
  return dynamic_cast<const ::gloo::Exception*>(&error) != nullptr ||
         dynamic_cast<const ::gloo::EnforceNotMet*>(&error) != nullptr;
}

}  // namespace tapetune
