// The inner loops, over plain memory. They are compiled apart from the rest: for several instruction sets, of which the
// loader picks the widest that the machine has, and without the promises of IEEE traps that keep compilers from
// vectors.
#pragma once

#include <cstdint>

namespace tapetune::kernels::loops {

void rms_norm(const float* x, const float* weight, float* y, std::int64_t width, float eps);
// dw, where not null, is added to.
void rms_norm_backward(const float* x, const float* weight, const float* dy, float* dx, float* dw, std::int64_t width,
                       float eps);

// position: `half` cosines, then as many sines. y may be x.
void rotate(const float* x, const float* position, float* y, std::int64_t half);
void rotate_back(const float* dy, const float* position, float* dx, std::int64_t half);
// Adds the gradient of the position.
void rotate_position(const float* dy, const float* x, float* d_position, std::int64_t half);

// One token's position state: (1 + change) (position + mix attended). scratch: room for [channels, width].
struct PositionUpdate {
  std::int64_t channels, heads, width;
  const float* mix;  // [channels, heads]
};
void update_position(const PositionUpdate& update, const float* position, const float* attended, const float* change,
                     float* out, float* scratch);
// d_mix is added to, the other gradients are written.
void update_position_backward(const PositionUpdate& update, const float* position, const float* attended,
                              const float* change, const float* d_out, float* d_position, float* d_attended,
                              float* d_change, float* d_mix, float* scratch);

// y may be gate.
void silu_mul(const float* gate, const float* up, float* y, std::int64_t count);
void silu_mul_backward(const float* dy, const float* gate, const float* up, float* d_gate, float* d_up,
                       std::int64_t count);

// Turns logits into the gradient of their cross-entropy with the target, and gives that loss; a negative target does
// not count, its gradient and loss are 0.
double softmax_gradient(float* logits, std::int64_t count, std::int64_t target);

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

// The product of each row of x with that of y: x, y [rows, width].
void row_dots(const float* x, const float* y, float* out, std::int64_t rows, std::int64_t width);

// softmax(q k^T scale + bias) for one query of one head, and values under such weights. bias may be null.
void attention_weights(const float* q, const float* k, const float* bias, float* weights, std::int64_t length,
                       std::int64_t width, float scale);
void weighted_sum(const float* weights, const float* v, float* out, std::int64_t length, std::int64_t width);

}  // namespace tapetune::kernels::loops
