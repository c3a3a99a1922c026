#include "model/linear.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include "kernels/matvec.h"
#include "kernels/pointwise.h"

namespace tapetune {

bool cpu_has_fast_bf16() {
#if defined(__x86_64__)
  static const bool fast = __builtin_cpu_supports("avx512bf16") != 0;
  return fast;
#else
  return false;
#endif
}

namespace {

// oneDNN's product of f32 matrices, which LibTorch registers for its compiler: 4 to 7% faster than the BLAS behind
// at::linear at the shapes of a prefill (tools/bench load). It has no gradient.
using OneDnnLinear = at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                                std::string_view, c10::List<std::optional<at::Scalar>>,
                                std::optional<std::string_view>);
const c10::TypedOperatorHandle<OneDnnLinear>* onednn_linear() {
  static const auto handle = []() -> std::optional<c10::TypedOperatorHandle<OneDnnLinear>> {
    const auto found = c10::Dispatcher::singleton().findSchema({"mkldnn::_linear_pointwise", ""});
    if (!found || !at::hasMKLDNN()) return std::nullopt;
    return found->typed<OneDnnLinear>();
  }();
  return handle ? &*handle : nullptr;
}

}  // namespace

at::Tensor apply(const Linear& linear, const at::Tensor& x) {
  if (kernels::matvec_applies(x, linear.weight) && !kernels::wants_gradient(linear.bias)) {
    std::vector<std::int64_t> shape = x.sizes().vec();
    shape.back() = linear.weight.size(0);
    return kernels::matvec(x, linear.weight, linear.bias).view(shape);
  }
  const bool slow_bf16 = x.is_cpu() && x.scalar_type() == at::kBFloat16 && !cpu_has_fast_bf16();
  const auto arithmetic = slow_bf16 ? at::kFloat : x.scalar_type();
  // A conversion lives only for this product: one matrix at a time is widened, the rest stays mapped.
  const at::Tensor weight = linear.weight.to(arithmetic);
  const at::Tensor bias = linear.bias.defined() ? linear.bias.to(arithmetic) : at::Tensor();
  const at::Tensor input = x.to(arithmetic);
  const auto* onednn = onednn_linear();
  if (onednn != nullptr && kernels::fused(input) && kernels::fused(weight) && !kernels::wants_gradient(bias)) {
    const std::optional<at::Tensor> optional_bias = bias.defined() ? std::optional(bias) : std::nullopt;
    return onednn->call(input, weight, optional_bias, "none", c10::List<std::optional<at::Scalar>>(), "")
        .to(x.scalar_type());
  }
  return at::linear(input, weight, bias).to(x.scalar_type());
}

}  // namespace tapetune
