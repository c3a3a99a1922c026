#include <cuda_bf16.h>

#include "kernels/cuda/loops.h"

namespace tapetune::kernels::cuda {

namespace {

constexpr int threads = 256;

__device__ float wide(float value) { return value; }
__device__ float wide(__nv_bfloat16 value) { return __bfloat162float(value); }
template <typename T>
__device__ T narrow(float value);
template <>
__device__ float narrow<float>(float value) {
  return value;
}
template <>
__device__ __nv_bfloat16 narrow<__nv_bfloat16>(float value) {
  return __float2bfloat16(value);
}

// One block a row.
template <typename T>
__global__ void rms_norm_kernel(const T* x, const T* weight, T* y, std::int64_t width, float eps) {
  x += blockIdx.x * width;
  y += blockIdx.x * width;
  float sum = 0;
  for (std::int64_t i = threadIdx.x; i < width; i += threads) sum += wide(x[i]) * wide(x[i]);
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
  __shared__ float partial[threads / 32];
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
  __syncthreads();
  float total = 0;
  for (int warp = 0; warp < threads / 32; ++warp) total += partial[warp];
  const float scale = rsqrtf(total / static_cast<float>(width) + eps);
  // Rounded to T before the weight, as transformers does.
  for (std::int64_t i = threadIdx.x; i < width; i += threads) {
    y[i] = narrow<T>(wide(weight[i]) * wide(narrow<T>(wide(x[i]) * scale)));
  }
}

// One thread a pair of numbers.
template <typename T>
__global__ void rotate_kernel(T* x, const float* position, Rotation r) {
  const std::int64_t index = blockIdx.x * static_cast<std::int64_t>(threads) + threadIdx.x;
  if (index >= r.batch * r.tokens * r.heads * r.half) return;
  const std::int64_t f = index % r.half, h = index / r.half % r.heads, n = index / (r.half * r.heads) % r.tokens,
                     b = index / (r.half * r.heads * r.tokens);
  const std::int64_t channel = h / (r.heads / r.channels);
  const float* angle = position + b * r.batch_stride + (n * r.channels + channel) * 2 * r.half + f;
  const float cos = angle[0], sin = angle[r.half];
  T* head = x + ((b * r.tokens + n) * r.heads + h) * 2 * r.half;
  const float first = wide(head[f]), second = wide(head[r.half + f]);
  head[f] = narrow<T>(first * cos - second * sin);
  head[r.half + f] = narrow<T>(second * cos + first * sin);
}

template <typename T>
__global__ void silu_mul_kernel(T* gate, const T* up, std::int64_t count) {
  const std::int64_t i = blockIdx.x * static_cast<std::int64_t>(threads) + threadIdx.x;
  if (i >= count) return;
  const float g = wide(gate[i]);
  gate[i] = narrow<T>(g / (1.0F + expf(-g)) * wide(up[i]));
}

unsigned blocks(std::int64_t count) { return static_cast<unsigned>((count + threads - 1) / threads); }

}  // namespace

void rms_norm(Number number, const void* x, const void* weight, void* y, std::int64_t rows, std::int64_t width,
              float eps, cudaStream_t stream) {
  const auto launch = [&]<typename T>(T*) {
    rms_norm_kernel<T><<<static_cast<unsigned>(rows), threads, 0, stream>>>(
        static_cast<const T*>(x), static_cast<const T*>(weight), static_cast<T*>(y), width, eps);
  };
  number == Number::f32 ? launch(static_cast<float*>(nullptr)) : launch(static_cast<__nv_bfloat16*>(nullptr));
}

void rotate(Number number, void* x, const float* position, const Rotation& r, cudaStream_t stream) {
  const unsigned grid = blocks(r.batch * r.tokens * r.heads * r.half);
  const auto launch = [&]<typename T>(T*) {
    rotate_kernel<T><<<grid, threads, 0, stream>>>(static_cast<T*>(x), position, r);
  };
  number == Number::f32 ? launch(static_cast<float*>(nullptr)) : launch(static_cast<__nv_bfloat16*>(nullptr));
}

void silu_mul(Number number, void* gate, const void* up, std::int64_t count, cudaStream_t stream) {
  const auto launch = [&]<typename T>(T*) {
    silu_mul_kernel<T><<<blocks(count), threads, 0, stream>>>(static_cast<T*>(gate), static_cast<const T*>(up), count);
  };
  number == Number::f32 ? launch(static_cast<float*>(nullptr)) : launch(static_cast<__nv_bfloat16*>(nullptr));
}

}  // namespace tapetune::kernels::cuda
