// The inner loops of causal attention and of its gradient, over plain memory and compiled as loops.cpp is.
#pragma once

#include <cstdint>

namespace tapetune::kernels::loops {

// A copy of rows of numbers that the products read: [rows, row_stride(width)], filled with zeros behind the width. The
// stride is an odd number of cache lines, because heads beside each other in memory make it a power of two, and the
// lines of such rows push each other out of the first cache.
constexpr std::int64_t lane = 16;  // numbers in a cache line, and columns of a tile
constexpr std::int64_t row_stride(std::int64_t width) { return ((width + lane - 1) / lane | 1) * lane; }
void copy_rows(const float* from, std::int64_t stride, std::int64_t rows, std::int64_t width, float* to);
// The same transposed, in panels of `lane` rows: [ceil(rows / lane), width, lane]; rows that are missing are zeros.
void copy_panels(const float* from, std::int64_t stride, std::int64_t rows, std::int64_t width, float* to);

// One head's queries, at most query_block of them, and the keys from the first that they see.
inline constexpr std::int64_t query_block = 96;
struct Forward {
  const float* q;
  std::int64_t q_stride, rows, width;
  std::int64_t seen;  // keys that the first query sees; each that follows sees one more
  float scale;
  const float* keys;          // panels
  const float* values;        // rows
  const float* extra_values;  // rows, or null
  float* out;                 // of the values, with the stride out_stride between queries
  float* extra_output;        // of `extra_values`
  std::int64_t out_stride;
  float* lse;
  float* scratch;  // forward_scratch(width) numbers
};
std::int64_t forward_scratch(std::int64_t width);
void attention_forward(const Forward& f);

// Some of one head's keys, and the queries from the first that sees one of them.
inline constexpr std::int64_t key_block = 96;  // keys at a time
struct Rows {
  const float* data;
  std::int64_t stride;
};
struct Backward {
  Rows q, k, v, extra_values;     // extra_values.data may be null
  Rows d_values, d_extra_output;  // d_extra_output: null where there is nothing to add
  const float* lse;
  Rows delta;  // a number a query
  std::int64_t queries, keys, width;
  std::int64_t past;  // keys that the first query sees before its own; it may be more than there are
  float scale;
  // The gradients are written, not added.
  float *d_q, *d_k, *d_v, *d_extra_values;  // d_extra_values may be null
  std::int64_t gradient_stride;             // the same for all
  float* scratch;                           // backward_scratch numbers
};
std::int64_t backward_scratch(std::int64_t queries, std::int64_t width);
void attention_backward(const Backward& b);

}  // namespace tapetune::kernels::loops
