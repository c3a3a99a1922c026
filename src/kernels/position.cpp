#include "kernels/position.h"

#include <ATen/Parallel.h>

#include "kernels/cpu/loops.h"
#include "kernels/grain.h"
#include "kernels/pointwise.h"

namespace tapetune::kernels {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

struct Update : Function<Update> {
  static loops::PositionUpdate sizes(const at::Tensor& attended, const at::Tensor& mix) {
    return {mix.size(0), mix.size(1), attended.size(3), mix.const_data_ptr<float>()};
  }
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& position, const at::Tensor& attended,
                            const at::Tensor& mix, const at::Tensor& change) {
    ctx->save_for_backward({position, attended, mix, change});
    const loops::PositionUpdate update = sizes(attended, mix);
    const std::int64_t state = update.channels * update.width, given = update.heads * update.width,
                       square = update.channels * update.channels;
    at::Tensor out = at::empty({attended.size(0), attended.size(1), update.channels, update.width}, attended.options());
    const auto* e = position.const_data_ptr<float>();
    const auto* a = attended.const_data_ptr<float>();
    const auto* m = change.const_data_ptr<float>();
    auto* to = out.mutable_data_ptr<float>();
    at::parallel_for(0, out.numel() / state, grain_of(state * update.heads), [&](std::int64_t begin, std::int64_t end) {
      std::vector<float> scratch(static_cast<std::size_t>(state));
      for (std::int64_t n = begin; n < end; ++n) {
        loops::update_position(update, e + n * state, a + n * given, m + n * square, to + n * state, scratch.data());
      }
    });
    return out;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &position = saved[0], &attended = saved[1], &mix = saved[2], &change = saved[3];
    const at::Tensor d_out = grads[0].contiguous();
    const loops::PositionUpdate update = sizes(attended, mix);
    const std::int64_t state = update.channels * update.width, given = update.heads * update.width,
                       square = update.channels * update.channels, tokens = d_out.numel() / state;
    at::Tensor d_position = at::empty_like(d_out), d_attended = at::empty_like(attended),
               d_change = at::empty_like(change);
    // A fixed number of partial sums, so that the gradient does not depend on the number of threads.
    constexpr std::int64_t blocks = 32;
    at::Tensor d_mix = at::zeros({blocks, update.channels, update.heads}, mix.options());
    const auto* e = position.const_data_ptr<float>();
    const auto* a = attended.const_data_ptr<float>();
    const auto* m = change.const_data_ptr<float>();
    const auto* dy = d_out.const_data_ptr<float>();
    auto* de = d_position.mutable_data_ptr<float>();
    auto* da = d_attended.mutable_data_ptr<float>();
    auto* dm = d_change.mutable_data_ptr<float>();
    auto* dw = d_mix.mutable_data_ptr<float>();
    at::parallel_for(
        0, blocks, grain_of(tokens * state * update.heads / blocks), [&](std::int64_t begin, std::int64_t end) {
          std::vector<float> scratch(static_cast<std::size_t>(state));
          for (std::int64_t b = begin; b < end; ++b) {
            for (std::int64_t n = tokens * b / blocks; n < tokens * (b + 1) / blocks; ++n) {
              loops::update_position_backward(update, e + n * state, a + n * given, m + n * square, dy + n * state,
                                              de + n * state, da + n * given, dm + n * square,
                                              dw + b * update.channels * update.heads, scratch.data());
            }
          }
        });
    return {d_position, d_attended, d_mix.sum(0), d_change};
  }
};

}  // namespace

at::Tensor update_position(const at::Tensor& position, const at::Tensor& attended, const at::Tensor& mix,
                           const at::Tensor& change) {
  const bool ours = attended.is_cpu() && attended.scalar_type() == at::kFloat && mix.scalar_type() == at::kFloat &&
                    change.scalar_type() == at::kFloat && position.scalar_type() == at::kFloat;
  if (ours) {
    const at::Tensor e = position.expand({attended.size(0), -1, mix.size(0), -1});
    return Update::apply(e.contiguous(), attended.contiguous(), mix.contiguous(), change.contiguous());
  }
  const at::Tensor moved = position + at::matmul(mix, attended);
  return moved + at::matmul(change, moved);
}

}  // namespace tapetune::kernels
