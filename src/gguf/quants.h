// The block formats' arithmetic over plain memory: to f32, bit for bit as llama.cpp and its gguf package, and to Q8_0.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "gguf/format.h"

namespace tapetune::gguf {

// Whole blocks of a quantised format: numbers.size() is blocks.size() / bytes * numbers of the format.
void dequantize(const BlockFormat& format, std::span<const std::byte> blocks, std::span<float> numbers);

// Whole blocks of 32; false when a number or a block's scale is not finite, and so cannot be stored.
bool quantize_q8_0(std::span<const float> numbers, std::span<std::byte> blocks);

}  // namespace tapetune::gguf
