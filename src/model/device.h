// Where a model computes.
#pragma once

#include <c10/core/Device.h>

#include <string>

namespace tapetune {

// "cpu", "cuda" or "cuda:1". Brings LibTorch's CUDA half in when it is asked for; fails clearly where there is no GPU.
at::Device open_device(const std::string& name);

}  // namespace tapetune
