// Whether numbers are free of NaN and Inf.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>

#include "core/error.h"

namespace tapetune {

// Reads the numbers once and allocates nothing where they are contiguous f32, f16 or bf16 on the CPU.
bool all_finite(const at::Tensor& tensor);

// NaN or Inf where numbers must be.
class NotFinite : public Error {
 public:
  using Error::Error;
};
[[noreturn]] void throw_not_finite(std::string_view component, const std::string& text);

}  // namespace tapetune
