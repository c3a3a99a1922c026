#include "kernels/decode_attention.h"

#include <ATen/Parallel.h>

#include "kernels/cpu/loops.h"

namespace tapetune::kernels {

std::pair<at::Tensor, at::Tensor> decode_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                   const at::Tensor& extra_values, const Scores& scores) {
  const std::int64_t heads = q.size(0), width = q.size(1), tokens = k.size(1), group = heads / k.size(0);
  const std::int64_t window = scores.visible.window, length = window == 0 ? tokens : std::min(tokens, window);
  const std::int64_t first = (tokens - length) * width;
  // The largest distance first, as the keys lie.
  const at::Tensor bias = scores.bias.defined() ? scores.bias.narrow(1, 0, length).flip(1).contiguous() : at::Tensor();
  const at::Tensor queries = q.contiguous();
  at::Tensor out = at::empty_like(queries),
             extra_output = extra_values.defined() ? at::empty_like(queries) : at::Tensor();
  const auto* from = queries.const_data_ptr<float>();
  at::parallel_for(
      0, heads, std::max<std::int64_t>(1, 8192 / (length * width)), [&](std::int64_t begin, std::int64_t end) {
        std::vector<float> weights(static_cast<std::size_t>(length));
        const auto sum = [&](std::int64_t h, const at::Tensor& values, const at::Tensor& to) {
          loops::weighted_sum(weights.data(), values.const_data_ptr<float>() + (h / group) * values.stride(0) + first,
                              to.mutable_data_ptr<float>() + h * width, length, width);
        };
        for (std::int64_t h = begin; h < end; ++h) {
          loops::attention_weights(from + h * width, k.const_data_ptr<float>() + (h / group) * k.stride(0) + first,
                                   bias.defined() ? bias.const_data_ptr<float>() + h * length : nullptr, weights.data(),
                                   length, width, static_cast<float>(scores.scale));
          sum(h, v, out);
          if (extra_values.defined()) sum(h, extra_values, extra_output);
        }
      });
  return {out, extra_output};
}

}  // namespace tapetune::kernels
