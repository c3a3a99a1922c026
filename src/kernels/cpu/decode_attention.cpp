#include "kernels/decode_attention.h"

#include <ATen/Parallel.h>

#include "kernels/cpu/simd.h"

namespace tapetune::kernels {

namespace {

TAPETUNE_SIMD void one_head(const float* q, const float* k, const float* v, float* out, float* scores,
                            std::int64_t length, std::int64_t width, float scale) {
  float largest = -INFINITY;
  for (std::int64_t t = 0; t < length; ++t) {
    const float* kt = k + t * width;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (std::int64_t i = 0; i < width; ++i) sum += q[i] * kt[i];
    scores[t] = sum * scale;
    largest = std::max(largest, scores[t]);
  }
  float total = 0;
  for (std::int64_t t = 0; t < length; ++t) {
    scores[t] = std::exp(scores[t] - largest);
    total += scores[t];
  }
  std::fill(out, out + width, 0.0F);
  for (std::int64_t t = 0; t < length; ++t) {
    const float* vt = v + t * width;
    const float weight = scores[t] / total;
#pragma omp simd
    for (std::int64_t i = 0; i < width; ++i) out[i] += weight * vt[i];
  }
}

}  // namespace

at::Tensor decode_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, std::int64_t length,
                            double scale) {
  const std::int64_t heads = q.size(0), width = q.size(1), group = heads / k.size(0);
  const at::Tensor queries = q.contiguous();
  at::Tensor out = at::empty_like(queries);
  const auto* from = queries.const_data_ptr<float>();
  auto* to = out.mutable_data_ptr<float>();
  at::parallel_for(0, heads, std::max<std::int64_t>(1, 8192 / (length * width)),
                   [&](std::int64_t begin, std::int64_t end) {
                     std::vector<float> scores(static_cast<std::size_t>(length));
                     for (std::int64_t h = begin; h < end; ++h) {
                       const auto* keys = k.const_data_ptr<float>() + (h / group) * k.stride(0);
                       const auto* values = v.const_data_ptr<float>() + (h / group) * v.stride(0);
                       one_head(from + h * width, keys, values, to + h * width, scores.data(), length, width,
                                static_cast<float>(scale));
                     }
                   });
  return out;
}

}  // namespace tapetune::kernels
