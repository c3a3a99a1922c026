// Names of number types: safetensors' ("BF16"), transformers' ("bfloat16") and ours on the command line ("bf16").
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>
#include <string>
#include <string_view>

namespace tapetune {

std::optional<at::ScalarType> dtype_from_safetensors(std::string_view name);
std::string dtype_to_safetensors(at::ScalarType dtype);
std::string dtype_to_transformers(at::ScalarType dtype);
std::optional<at::ScalarType> dtype_from_word(std::string_view word);  // f32, f16, bf16, f64

}  // namespace tapetune
