#include "kernels/matvec.h"

#include <ATen/Parallel.h>

#include "kernels/cpu/loops.h"
#include "kernels/pointwise.h"

namespace tapetune::kernels {

bool matvec_applies(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const auto dtype = weight.scalar_type();
  return fused(x) && weight.is_cpu() && !wants_gradient(weight) && !wants_gradient(bias) && weight.is_contiguous() &&
         (dtype == at::kFloat || dtype == at::kBFloat16) && x.numel() <= matvec_rows * x.size(-1);
}

at::Tensor matvec(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const at::Tensor in = x.contiguous();
  const std::int64_t width = weight.size(1), out_width = weight.size(0), rows = in.numel() / width;
  at::Tensor out = at::empty({rows, out_width}, in.options());
  const at::Tensor wide_bias = bias.defined() ? bias.to(at::kFloat).contiguous() : at::Tensor();
  const auto* b = wide_bias.defined() ? wide_bias.const_data_ptr<float>() : nullptr;
  const loops::Product product{in.const_data_ptr<float>(), rows, width, out_width, b, out.mutable_data_ptr<float>()};
  constexpr std::int64_t block = loops::output_block;
  const std::int64_t blocks = (out_width + block - 1) / block;
  // Blocks, not outputs, are shared out, so that an output's sum is formed alike with any number of threads.
  at::parallel_for(
      0, blocks, std::max<std::int64_t>(1, 32768 / (block * width)), [&](std::int64_t first, std::int64_t last) {
        const std::int64_t begin = first * block, end = std::min(last * block, out_width);
        if (weight.scalar_type() == at::kFloat) {
          loops::matvec_f32(product, weight.const_data_ptr<float>(), begin, end);
        } else {
          loops::matvec_bf16(product, static_cast<const std::uint16_t*>(weight.const_data_ptr()), begin, end);
        }
      });
  return out;
}

}  // namespace tapetune::kernels
