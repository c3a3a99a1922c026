// Where a model computes.
#pragma once

#include <c10/core/Device.h>

#include <filesystem>
#include <string>

namespace tapetune {

// "cpu", "cuda:1", "cuda" (the GPU of this rank), or "auto" (that GPU where the build has CUDA and there is one).
// Brings LibTorch's CUDA half in when it is asked for; fails clearly where there is no GPU.
at::Device open_device(const std::string& name, int local_rank = 0);

// Whether the machine has an NVIDIA GPU, whatever this build can use: its driver's files are below `root`.
bool has_gpu(const std::filesystem::path& root = "/");

}  // namespace tapetune
