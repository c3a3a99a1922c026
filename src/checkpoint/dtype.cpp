#include "checkpoint/dtype.h"

#include <array>

namespace tapetune {

namespace {

struct Names {
  at::ScalarType dtype;
  std::string_view safetensors, transformers, word;
};

constexpr std::array<Names, 12> names{{
    {at::kFloat, "F32", "float32", "f32"},
    {at::kHalf, "F16", "float16", "f16"},
    {at::kBFloat16, "BF16", "bfloat16", "bf16"},
    {at::kDouble, "F64", "float64", "f64"},
    {at::kLong, "I64", "int64", "i64"},
    {at::kInt, "I32", "int32", "i32"},
    {at::kShort, "I16", "int16", "i16"},
    {at::kChar, "I8", "int8", "i8"},
    {at::kByte, "U8", "uint8", "u8"},
    {at::kBool, "BOOL", "bool", "bool"},
    {at::kUInt16, "U16", "uint16", "u16"},
    {at::kUInt32, "U32", "uint32", "u32"},
}};

const Names* find(at::ScalarType dtype) {
  for (const Names& row : names) {
    if (row.dtype == dtype) return &row;
  }
  return nullptr;
}

}  // namespace

std::optional<at::ScalarType> dtype_from_safetensors(std::string_view name) {
  for (const Names& row : names) {
    if (row.safetensors == name) return row.dtype;
  }
  return std::nullopt;
}

std::optional<at::ScalarType> dtype_from_word(std::string_view word) {
  for (const Names& row : names) {
    if (row.word == word) return row.dtype;
  }
  return std::nullopt;
}

std::string dtype_to_safetensors(at::ScalarType dtype) {
  const Names* row = find(dtype);
  return row != nullptr ? std::string(row->safetensors) : c10::toString(dtype);
}

std::string dtype_to_transformers(at::ScalarType dtype) {
  const Names* row = find(dtype);
  return row != nullptr ? std::string(row->transformers) : c10::toString(dtype);
}

}  // namespace tapetune
