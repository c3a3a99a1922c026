#include "checkpoint/finite.h"

#include <algorithm>

namespace tapetune {

namespace {

// An exponent of all ones is Inf or NaN.
template <typename Word>
bool finite_words(const void* data, std::size_t count, Word exponent) {
  const auto* words = static_cast<const Word*>(data);
  constexpr std::size_t block = std::size_t{1} << 16;  // ends early, and within a block the loop is vectorized
  for (std::size_t begin = 0; begin < count; begin += block) {
    Word bad = 0;
    const std::size_t end = std::min(count, begin + block);
    for (std::size_t i = begin; i < end; ++i) bad |= static_cast<Word>((words[i] & exponent) == exponent);
    if (bad != 0) return false;
  }
  return true;
}

}  // namespace

void throw_not_finite(std::string_view component, const std::string& text) {
  try {
    throw_error(component, text);
  } catch (const Error& error) {
    throw NotFinite(error.what());
  }
}

bool all_finite(const at::Tensor& tensor) {
  const auto count = static_cast<std::size_t>(tensor.numel());
  if (tensor.is_cpu() && tensor.is_contiguous()) {
    switch (tensor.scalar_type()) {
      case at::kBFloat16:
        return finite_words<std::uint16_t>(tensor.const_data_ptr(), count, 0x7F80);
      case at::kHalf:
        return finite_words<std::uint16_t>(tensor.const_data_ptr(), count, 0x7C00);
      case at::kFloat:
        return finite_words<std::uint32_t>(tensor.const_data_ptr(), count, 0x7F800000);
      default:
        break;
    }
  }
  return at::isfinite(tensor).all().item<bool>();
}

}  // namespace tapetune
