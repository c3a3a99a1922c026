// The inner loops, over plain memory. They are compiled apart from the rest: for several instruction sets, of which the
// loader picks the widest that the machine has, and without the promises of IEEE traps that keep compilers from
// vectors.
#pragma once

#include <cstdint>

namespace tapetune::kernels::loops {

void rms_norm(const float* x, const float* weight, float* y, std::int64_t width, float eps);
void rotate(float* x, const float* cos, const float* sin, std::int64_t half);
void silu_mul(float* gate, const float* up, std::int64_t count);

// Outputs [begin, end) of x weight^T + bias for each row; begin is a multiple of `output_block`. bias may be null.
inline constexpr std::int64_t output_block = 4;
struct Product {
  const float* x;  // [rows, in]
  std::int64_t rows, in, out;
  const float* bias;  // [out] or null
  float* y;           // [rows, out]
};
void matvec_f32(const Product& p, const float* weight, std::int64_t begin, std::int64_t end);
void matvec_bf16(const Product& p, const std::uint16_t* weight, std::int64_t begin, std::int64_t end);

// softmax(q k^T scale) v for one query of one head; scores is room for `length` numbers.
void attend(const float* q, const float* k, const float* v, float* out, float* scores, std::int64_t length,
            std::int64_t width, float scale);

}  // namespace tapetune::kernels::loops
