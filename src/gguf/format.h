// What a GGUF file is made of: the kinds of its metadata, and the blocks that its tensors are stored in.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

namespace tapetune::gguf {

constexpr std::string_view magic = "GGUF";
constexpr std::uint64_t default_alignment = 32;

// As numbered in the file.
enum class Kind : std::uint32_t { u8, i8, u16, i16, u32, i32, f32, boolean, text, array, u64, i64, f64 };

enum class TensorType : std::uint32_t {
  f32 = 0,
  f16 = 1,
  q4_0 = 2,
  q4_1 = 3,
  q8_0 = 8,
  q4_k = 12,
  q6_k = 14,
  bf16 = 30,
};

// So many numbers of a row share a block of so many bytes; plain numbers are blocks of one.
struct BlockFormat {
  TensorType type;
  std::string_view name;  // "Q4_K"
  std::uint64_t numbers;
  std::uint64_t bytes;
};

// Nothing for a type that tapetune does not read.
const BlockFormat* find_format(std::uint32_t type);
const BlockFormat& format_of(TensorType type);

// What matrices can be written as, by the words of the command line.
const std::map<std::string, TensorType>& written_types();

// "Q5_K" for any type that llama.cpp has, read here or not; empty for a number that it does not know.
std::string_view known_type_name(std::uint32_t type);

// The kinds of token that tokenizer.ggml.token_type tells apart.
enum class TokenType : std::int32_t { normal = 1, unknown = 2, control = 3, user_defined = 4, unused = 5, byte = 6 };

}  // namespace tapetune::gguf
