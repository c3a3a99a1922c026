#include "gguf/format.h"

#include <algorithm>
#include <array>

namespace tapetune::gguf {

namespace {

constexpr std::array<BlockFormat, 8> formats{{
    {TensorType::f32, "F32", 1, 4},
    {TensorType::f16, "F16", 1, 2},
    {TensorType::q4_0, "Q4_0", 32, 18},
    {TensorType::q4_1, "Q4_1", 32, 20},
    {TensorType::q8_0, "Q8_0", 32, 34},
    {TensorType::q4_k, "Q4_K", 256, 144},
    {TensorType::q6_k, "Q6_K", 256, 210},
    {TensorType::bf16, "BF16", 1, 2},
}};

struct TypeName {
  std::uint32_t type;
  std::string_view name;
};

// Those that the table above leaves out.
constexpr std::array<TypeName, 24> other_types{{
    {6, "Q5_0"},   {7, "Q5_1"},     {9, "Q8_1"},    {10, "Q2_K"},    {11, "Q3_K"},  {13, "Q5_K"},
    {15, "Q8_K"},  {16, "IQ2_XXS"}, {17, "IQ2_XS"}, {18, "IQ3_XXS"}, {19, "IQ1_S"}, {20, "IQ4_NL"},
    {21, "IQ3_S"}, {22, "IQ2_S"},   {23, "IQ4_XS"}, {24, "I8"},      {25, "I16"},   {26, "I32"},
    {27, "I64"},   {28, "F64"},     {29, "IQ1_M"},  {34, "TQ1_0"},   {35, "TQ2_0"}, {39, "MXFP4"},
}};

}  // namespace

const BlockFormat* find_format(std::uint32_t type) {
  const auto found = std::find_if(formats.begin(), formats.end(), [&](const BlockFormat& known) {
    return static_cast<std::uint32_t>(known.type) == type;
  });
  return found == formats.end() ? nullptr : &*found;
}

const BlockFormat& format_of(TensorType type) { return *find_format(static_cast<std::uint32_t>(type)); }

const std::map<std::string, TensorType>& written_types() {
  static const std::map<std::string, TensorType> types{
      {"f32", TensorType::f32}, {"f16", TensorType::f16}, {"bf16", TensorType::bf16}, {"q8_0", TensorType::q8_0}};
  return types;
}

std::string_view known_type_name(std::uint32_t type) {
  if (const BlockFormat* format = find_format(type)) return format->name;
  const auto found =
      std::find_if(other_types.begin(), other_types.end(), [&](const TypeName& known) { return known.type == type; });
  return found == other_types.end() ? std::string_view() : found->name;
}

}  // namespace tapetune::gguf
