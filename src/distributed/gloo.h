// The one place that knows Gloo, which exchanges tensors in CPU memory.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <exception>
#include <string>

namespace tapetune {

// Connects to all others of the group. `address`: of this machine, as the others reach it.
c10::intrusive_ptr<c10d::Backend> connect_gloo(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                               const std::string& address, std::chrono::milliseconds timeout);

// Whether a collective or a connection of Gloo failed.
bool is_gloo_error(const std::exception& error);

}  // namespace tapetune
