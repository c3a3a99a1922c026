#include "kernels/decode_attention.h"

#include <ATen/Parallel.h>

#include "kernels/cpu/loops.h"

namespace tapetune::kernels {

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
                       loops::attend(from + h * width, keys, values, to + h * width, scores.data(), length, width,
                                     static_cast<float>(scale));
                     }
                   });
  return out;
}

}  // namespace tapetune::kernels
