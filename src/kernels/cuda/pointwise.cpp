#include "kernels/cuda/pointwise.h"

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "kernels/cuda/loops.h"
#include "kernels/pointwise.h"

namespace tapetune::kernels::cuda {

namespace {

Number number(const at::Tensor& x) { return x.scalar_type() == at::kFloat ? Number::f32 : Number::bf16; }

}  // namespace

bool applies(std::initializer_list<at::Tensor> tensors) {
  const at::Tensor& first = *tensors.begin();
  return std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& x) {
    return x.is_cuda() && x.device() == first.device() && x.is_contiguous() && x.scalar_type() == first.scalar_type() &&
           (x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16) && !wants_gradient(x);
  });
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  const c10::cuda::CUDAGuard device(x.device());
  at::Tensor out = at::empty_like(x);
  rms_norm(number(x), x.const_data_ptr(), weight.const_data_ptr(), out.mutable_data_ptr(), x.numel() / x.size(-1),
           x.size(-1), static_cast<float>(eps), c10::cuda::getCurrentCUDAStream());
  return out;
}

at::Tensor rotate(const at::Tensor& x, const at::Tensor& position) {
  const c10::cuda::CUDAGuard device(x.device());
  const at::Tensor e = position.to(at::kFloat).contiguous();
  const Rotation r{x.size(0),     x.size(1), x.size(2),
                   x.size(3) / 2, e.size(2), e.size(0) == 1 ? 0 : e.size(1) * e.size(2) * e.size(3)};
  rotate(number(x), x.mutable_data_ptr(), e.const_data_ptr<float>(), r, c10::cuda::getCurrentCUDAStream());
  return x;
}

at::Tensor silu_mul(const at::Tensor& gate, const at::Tensor& up) {
  const c10::cuda::CUDAGuard device(gate.device());
  silu_mul(number(gate), gate.mutable_data_ptr(), up.const_data_ptr(), gate.numel(), c10::cuda::getCurrentCUDAStream());
  return gate;
}

}  // namespace tapetune::kernels::cuda
