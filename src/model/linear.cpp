#include "model/linear.h"

#include "kernels/matvec.h"

namespace tapetune {

bool cpu_has_fast_bf16() {
#if defined(__x86_64__)
  static const bool fast = __builtin_cpu_supports("avx512bf16") != 0;
  return fast;
#else
  return false;
#endif
}

at::Tensor apply(const Linear& linear, const at::Tensor& x) {
  if (kernels::matvec_applies(x, linear.weight, linear.bias)) {
    std::vector<std::int64_t> shape = x.sizes().vec();
    shape.back() = linear.weight.size(0);
    return kernels::matvec(x, linear.weight, linear.bias).view(shape);
  }
  const bool slow_bf16 = x.is_cpu() && x.scalar_type() == at::kBFloat16 && !cpu_has_fast_bf16();
  const auto arithmetic = slow_bf16 ? at::kFloat : x.scalar_type();
  // A conversion lives only for this product: one matrix at a time is widened, the rest stays mapped.
  const at::Tensor weight = linear.weight.to(arithmetic);
  const at::Tensor bias = linear.bias.defined() ? linear.bias.to(arithmetic) : at::Tensor();
  return at::linear(x.to(arithmetic), weight, bias).to(x.scalar_type());
}

}  // namespace tapetune
