// Products are rounded before they are added, as in the other implementations: this file is compiled without fused
// multiply-add.
#include "gguf/quants.h"

#include <c10/util/Half.h>

#include <cmath>
#include <cstring>

#include "core/error.h"

namespace tapetune::gguf {

namespace {

float half_at(const std::uint8_t* bytes) {
  std::uint16_t bits = 0;
  std::memcpy(&bits, bytes, sizeof bits);
  return c10::Half(bits, c10::Half::from_bits());
}

// The two numbers of a byte are half a block (or 32 numbers) apart: low bits first.
int low(std::uint8_t byte) { return byte & 0x0f; }
int high(std::uint8_t byte) { return byte >> 4; }

// scale f16, 32 x i8
void from_q8_0(const std::uint8_t* block, float* out) {
  const float scale = half_at(block);
  for (int i = 0; i < 32; ++i) out[i] = static_cast<float>(static_cast<std::int8_t>(block[2 + i])) * scale;
}

// scale f16, 16 bytes of two
void from_q4_0(const std::uint8_t* block, float* out) {
  const float scale = half_at(block);
  for (int i = 0; i < 16; ++i) {
    out[i] = scale * static_cast<float>(low(block[2 + i]) - 8);
    out[i + 16] = scale * static_cast<float>(high(block[2 + i]) - 8);
  }
}

// scale f16, least f16, 16 bytes of two
void from_q4_1(const std::uint8_t* block, float* out) {
  const float scale = half_at(block), least = half_at(block + 2);
  for (int i = 0; i < 16; ++i) {
    out[i] = scale * static_cast<float>(low(block[4 + i])) + least;
    out[i + 16] = scale * static_cast<float>(high(block[4 + i])) + least;
  }
}

// scale of scales f16, scale of leasts f16, 12 bytes with 8 scales and 8 leasts of 6 bits, 128 bytes of two.
// The first four of each have a byte of their own (its low 6 bits); the last four have their low 4 bits in the last
// four bytes and their high 2 bits on top of the first four's.
void from_q4_k(const std::uint8_t* block, float* out) {
  const float scales_scale = half_at(block), leasts_scale = half_at(block + 2);
  const std::uint8_t* packed = block + 4;
  const std::uint8_t* numbers = block + 16;
  for (int part = 0; part < 8; ++part) {
    const int j = part % 4;
    const int scale = part < 4 ? packed[j] & 63 : low(packed[8 + j]) | (packed[j] >> 6) << 4;
    const int least = part < 4 ? packed[4 + j] & 63 : high(packed[8 + j]) | (packed[4 + j] >> 6) << 4;
    const float step = scales_scale * static_cast<float>(scale), start = leasts_scale * static_cast<float>(least);
    for (int i = 0; i < 32; ++i) {
      const std::uint8_t byte = numbers[part / 2 * 32 + i];
      out[part * 32 + i] = step * static_cast<float>(part % 2 == 0 ? low(byte) : high(byte)) - start;
    }
  }
}

// 128 bytes with the low 4 bits, 64 bytes with the high 2 bits, 16 scales i8, scale of scales f16
void from_q6_k(const std::uint8_t* block, float* out) {
  const std::uint8_t *low_bits = block, *high_bits = block + 128, *scales = block + 192;
  const float scales_scale = half_at(block + 208);
  for (int i = 0; i < 256; ++i) {
    const int half = i / 128, quarter = i % 128 / 32, column = i % 32;
    const std::uint8_t lows = low_bits[half * 64 + quarter % 2 * 32 + column];
    const int bottom = quarter < 2 ? low(lows) : high(lows);
    const int top = high_bits[half * 32 + column] >> (2 * quarter) & 3;
    const float scale = scales_scale * static_cast<float>(static_cast<std::int8_t>(scales[i / 16]));
    out[i] = scale * static_cast<float>((bottom | top << 4) - 32);
  }
}

template <void (*from)(const std::uint8_t*, float*)>
void each_block(const BlockFormat& format, std::span<const std::byte> blocks, std::span<float> numbers) {
  const auto* block = reinterpret_cast<const std::uint8_t*>(blocks.data());
  for (std::size_t i = 0; i < numbers.size(); i += format.numbers, block += format.bytes) from(block, &numbers[i]);
}

}  // namespace

void dequantize(const BlockFormat& format, std::span<const std::byte> blocks, std::span<float> numbers) {
  switch (format.type) {
    case TensorType::q8_0:
      return each_block<from_q8_0>(format, blocks, numbers);
    case TensorType::q4_0:
      return each_block<from_q4_0>(format, blocks, numbers);
    case TensorType::q4_1:
      return each_block<from_q4_1>(format, blocks, numbers);
    case TensorType::q4_k:
      return each_block<from_q4_k>(format, blocks, numbers);
    case TensorType::q6_k:
      return each_block<from_q6_k>(format, blocks, numbers);
    case TensorType::f32:
    case TensorType::f16:
    case TensorType::bf16:
      fail("gguf", "{} are plain numbers and need no dequantisation.", format.name);
  }
}

bool quantize_q8_0(std::span<const float> numbers, std::span<std::byte> blocks) {
  const BlockFormat& format = format_of(TensorType::q8_0);
  bool finite = true;
  std::byte* block = blocks.data();
  for (std::size_t start = 0; start < numbers.size(); start += format.numbers, block += format.bytes) {
    float largest = 0;
    for (std::size_t i = 0; i < format.numbers; ++i) {
      const float size = std::fabs(numbers[start + i]);
      finite = finite && std::isfinite(size);
      largest = std::max(largest, size);
    }
    const float scale = largest / 127;
    const c10::Half stored = scale;
    if (!finite || !std::isfinite(static_cast<float>(stored))) return false;
    // The reciprocal of the smallest numbers of all is none; they are stored as zeros, which is what a scale of 0 makes
    // of them anyway.
    const float inverse = scale != 0 && std::isfinite(1 / scale) ? 1 / scale : 0;
    std::memcpy(block, &stored.x, sizeof stored.x);
    for (std::size_t i = 0; i < format.numbers; ++i) {
      block[2 + i] = static_cast<std::byte>(static_cast<std::int8_t>(std::round(numbers[start + i] * inverse)));
    }
  }
  return true;
}

}  // namespace tapetune::gguf
