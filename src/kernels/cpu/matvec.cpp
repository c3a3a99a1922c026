#include "kernels/matvec.h"

#include <ATen/Parallel.h>

#include <atomic>

#include "kernels/cpu/loops.h"
#include "kernels/pointwise.h"

namespace tapetune::kernels {

bool matvec_applies(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const auto dtype = weight.scalar_type();
  return fused(x) && weight.is_cpu() && !wants_gradient(weight) && !wants_gradient(bias) && weight.is_contiguous() &&
         (dtype == at::kFloat || dtype == at::kBFloat16) && x.numel() <= matvec_rows * x.size(-1);
}

std::vector<at::Tensor> matvec(const at::Tensor& x, std::span<const Matrix> matrices) {
  struct Job {
    loops::Product product;
    at::Tensor weight, bias;
    std::int64_t outputs, pieces;  // of a piece, and pieces of them
  };
  constexpr std::int64_t piece = 1 << 14;  // numbers of a weight, about: long enough to be read at full speed
  const at::Tensor in = x.contiguous();
  const std::int64_t width = in.size(-1), rows = in.numel() / width;
  std::vector<at::Tensor> out;
  std::vector<Job> jobs;
  std::int64_t pieces = 0;
  for (const auto& [weight, bias] : matrices) {
    const std::int64_t outputs = weight.size(0), block = loops::output_block;
    out.push_back(at::empty({rows, outputs}, in.options()));
    Job job{{}, weight, bias.defined() ? bias.to(at::kFloat).contiguous() : at::Tensor(), 0, 0};
    job.product = {in.const_data_ptr<float>(),
                   rows,
                   width,
                   outputs,
                   job.bias.defined() ? job.bias.const_data_ptr<float>() : nullptr,
                   out.back().mutable_data_ptr<float>()};
    // Whole blocks, so that an output's sum is formed alike with any number of threads.
    job.outputs = std::max<std::int64_t>(1, piece / (block * width)) * block;
    job.pieces = (outputs + job.outputs - 1) / job.outputs;
    pieces += job.pieces;
    jobs.push_back(std::move(job));
  }
  // Whoever is done takes the next piece: a thread that wakes up late is not waited for.
  std::atomic<std::int64_t> next = 0;
  at::parallel_for(
      0, std::min<std::int64_t>(at::get_num_threads(), (pieces + 1) / 2), 1, [&](std::int64_t, std::int64_t) {
        for (std::int64_t taken = next++; taken < pieces; taken = next++) {
          auto job = jobs.begin();
          std::int64_t own = taken;
          for (; own >= job->pieces; ++job) own -= job->pieces;
          const std::int64_t begin = own * job->outputs, end = std::min(begin + job->outputs, job->product.out);
          if (job->weight.scalar_type() == at::kFloat) {
            loops::matvec_f32(job->product, job->weight.const_data_ptr<float>(), begin, end);
          } else {
            loops::matvec_bf16(job->product, static_cast<const std::uint16_t*>(job->weight.const_data_ptr()), begin,
                               end);
          }
        }
      });
  return out;
}

}  // namespace tapetune::kernels
