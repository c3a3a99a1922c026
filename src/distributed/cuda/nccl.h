// The one place that knows NCCL, which exchanges tensors in the memory of GPUs.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>

namespace tapetune {

c10::intrusive_ptr<c10d::Backend> connect_nccl(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                               at::Device device, std::chrono::milliseconds timeout);

}  // namespace tapetune
