// GGUF's block formats: the numbers that they stand for, and Q8_0's rounding.
#include "catch.h"
#include "gguf/metadata.h"
#include "gguf/quants.h"
#include "support.h"

namespace gguf_quants_test {

using namespace tapetune;
using namespace tapetune::test;
using gguf::TensorType;

namespace {

std::vector<float> dequantized(TensorType type, const std::string& block) {
  const gguf::BlockFormat& format = gguf::format_of(type);
  REQUIRE(block.size() == format.bytes);
  std::vector<float> numbers(format.numbers);
  gguf::dequantize(format, std::as_bytes(std::span(block)), numbers);
  return numbers;
}

std::string half(float value) {
  std::string bytes;
  gguf::append(bytes, c10::Half(value).x);
  return bytes;
}

std::string bytes_of(const std::vector<int>& values) { return {values.begin(), values.end()}; }

}  // namespace

TEST_CASE("gguf: blocks of 32 become the numbers that they stand for") {
  std::vector<int> fours, eights;  // byte i holds i and 15 - i
  for (int i = 0; i < 16; ++i) fours.push_back(i | (15 - i) << 4);
  for (int i = 0; i < 32; ++i) eights.push_back(i - 16);
  const std::vector<float> q4_0 = dequantized(TensorType::q4_0, half(0.5) + bytes_of(fours));
  const std::vector<float> q4_1 = dequantized(TensorType::q4_1, half(0.5) + half(-3) + bytes_of(fours));
  const std::vector<float> q8_0 = dequantized(TensorType::q8_0, half(0.25) + bytes_of(eights));
  for (std::size_t i = 0; i < 32; ++i) {
    INFO(i);
    const auto number = static_cast<float>(i < 16 ? i : 31 - i);
    CHECK(q4_0[i] == 0.5f * (number - 8));
    CHECK(q4_1[i] == 0.5f * number - 3);
    CHECK(q8_0[i] == 0.25f * (static_cast<float>(i) - 16));
  }
}

TEST_CASE("gguf: Q4_K and Q6_K take their scales from where llama.cpp packs them") {
  const auto scale = [](int part) { return 5 + 7 * part; };   // to 54: all six bits
  const auto least = [](int part) { return 61 - 6 * part; };  // from 61
  const auto four = [](int part, int i) { return (3 * part + i) % 16; };
  std::vector<int> packed(12), numbers(128);
  for (int j = 0; j < 4; ++j) {
    packed[j] = scale(j) | (scale(j + 4) >> 4) << 6;
    packed[4 + j] = least(j) | (least(j + 4) >> 4) << 6;
    packed[8 + j] = (scale(j + 4) & 15) | (least(j + 4) & 15) << 4;
    for (int i = 0; i < 32; ++i) numbers[32 * j + i] = four(2 * j, i) | four(2 * j + 1, i) << 4;
  }
  const std::vector<float> q4_k =
      dequantized(TensorType::q4_k, half(0.5) + half(0.25) + bytes_of(packed) + bytes_of(numbers));
  for (int i = 0; i < 256; ++i) {
    INFO(i);
    const int part = i / 32;
    CHECK(q4_k[i] ==
          0.5f * static_cast<float>(scale(part) * four(part, i % 32)) - 0.25f * static_cast<float>(least(part)));
  }

  const auto six = [](int i) { return 5 * i % 64; };
  std::vector<int> low(128), high(64), scales(16);
  for (int i = 0; i < 256; ++i) {
    const int half_block = i / 128, row = i % 128 / 32, column = i % 32;
    low[64 * half_block + 32 * (row % 2) + column] |= (six(i) & 15) << (row < 2 ? 0 : 4);
    high[32 * half_block + column] |= (six(i) >> 4) << (2 * row);
  }
  for (int i = 0; i < 16; ++i) scales[i] = 7 * i - 50;
  const std::vector<float> q6_k =
      dequantized(TensorType::q6_k, bytes_of(low) + bytes_of(high) + bytes_of(scales) + half(0.125));
  for (int i = 0; i < 256; ++i) {
    INFO(i);
    CHECK(q6_k[i] == 0.125f * static_cast<float>((7 * (i / 16) - 50) * (six(i) - 32)));
  }
}

TEST_CASE("gguf: Q8_0 rounds halves away from zero and refuses what it cannot hold") {
  std::vector<float> numbers(64, 0);
  numbers[0] = -127;  // a scale of 1
  numbers[1] = 2.5;
  numbers[2] = -2.5;
  numbers[3] = 0.49999997f;
  std::vector<std::byte> blocks(68);
  REQUIRE(gguf::quantize_q8_0(numbers, blocks));
  const std::string bytes(reinterpret_cast<const char*>(blocks.data()), blocks.size());
  CHECK(bytes.substr(0, 6) == half(1) + bytes_of({-127, 3, -3, 0}));
  CHECK(bytes.substr(34) == std::string(34, '\0'));  // a block of zeros has a scale of zero
  for (const float bad : {INFINITY, -INFINITY, NAN, 1e9f}) {
    numbers[40] = bad;
    CHECK_FALSE(gguf::quantize_q8_0(numbers, blocks));
  }
  numbers[40] = 1e-40f;  // its reciprocal is no number
  REQUIRE(gguf::quantize_q8_0(numbers, blocks));
  CHECK(blocks[34 + 2 + 8] == std::byte{0});
}

}  // namespace gguf_quants_test
