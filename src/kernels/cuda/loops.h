// The CUDA kernels behind plain pointers: ATen stays out of .cu files, where it costs 40 s each.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace tapetune::kernels::cuda {

enum class Number { f32, bf16 };

void rms_norm(Number number, const void* x, const void* weight, void* y, std::int64_t rows, std::int64_t width,
              float eps, cudaStream_t stream);

// x [B, N, H, D] in place; position [B or 1, N, C, D] f32, batch_stride 0 where it is the same for all rows.
struct Rotation {
  std::int64_t batch, tokens, heads, half, channels, batch_stride;
};
void rotate(Number number, void* x, const float* position, const Rotation& r, cudaStream_t stream);

void silu_mul(Number number, void* gate, const void* up, std::int64_t count, cudaStream_t stream);

}  // namespace tapetune::kernels::cuda
