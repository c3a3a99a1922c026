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

// A bias is added to the scores by distance. It lies in memory as the keys do, the largest distance first: where it
// points is distance 0, and entry -d is added to the score of the key that is d tokens back, in powers of two. Whole
// tiles touch as many numbers more at either end.
inline constexpr std::int64_t bias_room = 64;
inline constexpr float log2_e = 1.44269504F;

// One head's queries, at most query_block of them, and the keys from the first that they see, or from before it.
inline constexpr std::int64_t query_block = 96;
struct Forward {
  const float* q;
  std::int64_t q_stride, rows, width;
  std::int64_t
      seen;  // keys up to the first query's own, which is the last that it sees; one more for each that follows
  std::int64_t hidden;  // keys of these that a window hides from the first query, or less than 0; likewise
  float scale;
  const float* bias;          // or null
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
  std::int64_t past;   // keys before the first query's own; it may be more than there are
  std::int64_t reach;  // keys that a query sees at most, its own included
  float scale;
  const float* bias;  // or null
  float* d_bias;      // in the order of the bias, and added to; or null
  // The gradients are written, not added.
  float *d_q, *d_k, *d_v, *d_extra_values;  // d_extra_values may be null
  std::int64_t gradient_stride;             // the same for all
  float* scratch;                           // backward_scratch numbers
};
std::int64_t backward_scratch(std::int64_t queries, std::int64_t width);
void attention_backward(const Backward& b);

}  // namespace tapetune::kernels::loops
