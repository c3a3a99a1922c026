#include "kernels/pointwise.h"

#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>

#include "kernels/cpu/loops.h"
#include "kernels/grain.h"
#ifdef TAPETUNE_CUDA
#include "kernels/cuda/pointwise.h"
#endif

namespace tapetune::kernels {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

bool plain(const at::Tensor& x) { return x.is_cpu() && x.scalar_type() == at::kFloat && x.is_contiguous(); }

at::Tensor norm_forward(const at::Tensor& x, const at::Tensor& weight, double eps) {
  at::Tensor out = at::empty_like(x);
  const std::int64_t width = x.size(-1);
  const auto* from = x.const_data_ptr<float>();
  const auto* w = weight.const_data_ptr<float>();
  auto* to = out.mutable_data_ptr<float>();
  at::parallel_for(0, x.numel() / width, grain_of(width), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      loops::rms_norm(from + r * width, w, to + r * width, width, static_cast<float>(eps));
    }
  });
  return out;
}

struct Norm : Function<Norm> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight, double eps) {
    ctx->save_for_backward({x, weight});
    ctx->saved_data["eps"] = eps;
    return norm_forward(x, weight, eps);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], d_out = grads[0].contiguous();
    const auto eps = static_cast<float>(ctx->saved_data["eps"].toDouble());
    const std::int64_t width = x.size(-1), rows = x.numel() / width;
    const bool trained = ctx->needs_input_grad(1);
    // A fixed number of partial sums, so that the gradient does not depend on the number of threads.
    constexpr std::int64_t blocks = 32;
    at::Tensor partial = trained ? at::zeros({blocks, width}, x.options()) : at::Tensor();
    at::Tensor d_x = at::empty_like(x);
    const auto* from = x.const_data_ptr<float>();
    const auto* w = weight.const_data_ptr<float>();
    const auto* dy = d_out.const_data_ptr<float>();
    auto* dx = d_x.mutable_data_ptr<float>();
    auto* dw = trained ? partial.mutable_data_ptr<float>() : nullptr;
    at::parallel_for(0, blocks, grain_of(x.numel() / blocks), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t b = begin; b < end; ++b) {
        for (std::int64_t r = rows * b / blocks; r < rows * (b + 1) / blocks; ++r) {
          loops::rms_norm_backward(from + r * width, w, dy + r * width, dx + r * width,
                                   trained ? dw + b * width : nullptr, width, eps);
        }
      }
    });
    return {d_x, trained ? partial.sum(0) : at::Tensor(), {}};
  }
};

// Calls turn(data of a head, data of its channel, head offset, channel offset) for every head of every token.
template <typename Turn>
void each_head(const at::Tensor& x, const at::Tensor& position, const Turn& turn) {
  const std::int64_t batch = x.size(0), tokens = x.size(1), heads = x.size(2), width = x.size(3);
  const std::int64_t channels = position.size(2), group = heads / channels;
  const std::int64_t shared = position.size(0) == 1 ? tokens : batch * tokens;
  at::parallel_for(0, batch * tokens, grain_of(heads * width), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      for (std::int64_t h = 0; h < heads; ++h) {
        const std::int64_t channel = h / group;
        turn((row * heads + h) * width, ((row % shared) * channels + channel) * width,
             (row * channels + channel) * width);
      }
    }
  });
}

void rotate_into(const at::Tensor& x, const at::Tensor& position, const at::Tensor& out) {
  const std::int64_t half = x.size(3) / 2;
  const auto* from = x.const_data_ptr<float>();
  const auto* e = position.const_data_ptr<float>();
  auto* to = out.mutable_data_ptr<float>();
  each_head(x, position, [&](std::int64_t head, std::int64_t channel, std::int64_t) {
    loops::rotate(from + head, e + channel, to + head, half);
  });
}

struct Rotate : Function<Rotate> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& position) {
    // Only a position that learns needs x again.
    ctx->save_for_backward({position.requires_grad() ? x : at::Tensor(), position});
    at::Tensor out = at::empty_like(x);
    rotate_into(x, position, out);
    return out;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &position = saved[1], d_out = grads[0].contiguous();
    const std::int64_t half = d_out.size(3) / 2;
    at::Tensor d_x = at::empty_like(d_out), d_position;
    const auto* e = position.const_data_ptr<float>();
    const auto* dy = d_out.const_data_ptr<float>();
    auto* dx = d_x.mutable_data_ptr<float>();
    if (!x.defined()) {
      each_head(d_out, position, [&](std::int64_t head, std::int64_t channel, std::int64_t) {
        loops::rotate_back(dy + head, e + channel, dx + head, half);
      });
      return {d_x, {}};
    }
    d_position = at::zeros({d_out.size(0), d_out.size(1), position.size(2), position.size(3)}, position.options());
    const auto* from = x.const_data_ptr<float>();
    auto* de = d_position.mutable_data_ptr<float>();
    each_head(d_out, position, [&](std::int64_t head, std::int64_t channel, std::int64_t own_channel) {
      loops::rotate_back(dy + head, e + channel, dx + head, half);
      loops::rotate_position(dy + head, from + head, de + own_channel, half);
    });
    if (position.size(0) != d_position.size(0)) d_position = d_position.sum(0, true);
    return {d_x, d_position};
  }
};

struct Gate : Function<Gate> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& gate, const at::Tensor& up) {
    ctx->save_for_backward({gate, up});
    at::Tensor out = at::empty_like(gate);
    const auto* g = gate.const_data_ptr<float>();
    const auto* u = up.const_data_ptr<float>();
    auto* y = out.mutable_data_ptr<float>();
    at::parallel_for(0, gate.numel(), grain_of(1), [&](std::int64_t begin, std::int64_t end) {
      loops::silu_mul(g + begin, u + begin, y + begin, end - begin);
    });
    return out;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor d_out = grads[0].contiguous();
    at::Tensor d_gate = at::empty_like(saved[0]), d_up = at::empty_like(saved[1]);
    const auto* g = saved[0].const_data_ptr<float>();
    const auto* u = saved[1].const_data_ptr<float>();
    const auto* dy = d_out.const_data_ptr<float>();
    auto* dg = d_gate.mutable_data_ptr<float>();
    auto* du = d_up.mutable_data_ptr<float>();
    at::parallel_for(0, d_out.numel(), grain_of(1), [&](std::int64_t begin, std::int64_t end) {
      loops::silu_mul_backward(dy + begin, g + begin, u + begin, dg + begin, du + begin, end - begin);
    });
    return {d_gate, d_up};
  }
};

}  // namespace

bool wants_gradient(const at::Tensor& x) { return x.defined() && c10::GradMode::is_enabled() && x.requires_grad(); }

bool fused(const at::Tensor& x) { return x.is_cpu() && x.scalar_type() == at::kFloat && !wants_gradient(x); }

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
#ifdef TAPETUNE_CUDA
  if (cuda::applies({x, weight})) return cuda::rms_norm(x, weight, eps);
#endif
  const bool graph = wants_gradient(x) || wants_gradient(weight);
  if (x.is_cpu() && x.scalar_type() == at::kFloat && plain(weight)) {
    const at::Tensor in = x.contiguous();
    return graph ? Norm::apply(in, weight, eps) : norm_forward(in, weight, eps);
  }
  const auto precise = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor wide = x.to(precise);
  const at::Tensor scaled = wide * at::rsqrt(wide.square().mean(-1, true) + eps);
  return (weight.to(precise) * scaled.to(x.scalar_type()).to(precise)).to(x.scalar_type());
}

at::Tensor rotate(const at::Tensor& x, const at::Tensor& position) {
#ifdef TAPETUNE_CUDA
  if (cuda::applies({x}) && !wants_gradient(position)) return cuda::rotate(x, position);
#endif
  const bool graph = wants_gradient(x) || wants_gradient(position);
  if (plain(x) && position.scalar_type() == at::kFloat) {
    const at::Tensor e = position.contiguous();
    if (graph) return Rotate::apply(x, e);
    rotate_into(x, e, x);
    return x;
  }
  const std::int64_t half = x.size(3) / 2, group = x.size(2) / position.size(2);
  const at::Tensor e = position.to(x.scalar_type());
  const at::Tensor by_head = position.size(2) == 1 ? e : e.repeat_interleave(group, 2);  // [B|1, N, H or 1, D]
  const at::Tensor c = by_head.narrow(-1, 0, half), s = by_head.narrow(-1, half, half);
  const at::Tensor a = x.narrow(-1, 0, half), b = x.narrow(-1, half, half);
  return at::cat({a * c - b * s, b * c + a * s}, -1);
}

at::Tensor silu_mul(const at::Tensor& gate, const at::Tensor& up) {
#ifdef TAPETUNE_CUDA
  if (cuda::applies({gate, up})) return cuda::silu_mul(gate, up);
#endif
  if (!plain(gate) || !plain(up)) return at::silu(gate) * up;
  if (wants_gradient(gate) || wants_gradient(up)) return Gate::apply(gate, up);
  auto* g = gate.mutable_data_ptr<float>();
  const auto* u = up.const_data_ptr<float>();
  at::parallel_for(0, gate.numel(), grain_of(1), [&](std::int64_t begin, std::int64_t end) {
    loops::silu_mul(g + begin, u + begin, g + begin, end - begin);
  });
  return gate;
}

}  // namespace tapetune::kernels
