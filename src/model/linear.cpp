#include "model/linear.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <cstdlib>

#include "kernels/matvec.h"
#include "kernels/pointwise.h"

namespace tapetune {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

at::Tensor rows_of(const at::Tensor& x) { return x.reshape({-1, x.size(-1)}); }

std::vector<std::int64_t> shape_with(const at::Tensor& x, std::int64_t width) {
  std::vector<std::int64_t> shape = x.sizes().vec();
  shape.back() = width;
  return shape;
}

// What is there of the parts of all additions, one below the other, so that one product serves them all: [sum of r, …].
at::Tensor stacked(std::span<const at::Tensor> parts, at::ScalarType dtype) {
  std::vector<at::Tensor> defined;
  for (const at::Tensor& part : parts) {
    if (part.defined()) defined.push_back(part.to(dtype));
  }
  return defined.empty() ? at::Tensor() : defined.size() == 1 ? defined.front() : at::cat(defined);
}

struct Projections : Function<Projections> {
  struct Call {
    std::vector<double> scales;
    // Autograd takes no undefined tensors: those that exist come as a list, with their places among
    // all weights, all biases, all a, all b (n of each).
    std::vector<std::int64_t> places;
    bool gradients_only;
  };
  static std::vector<at::Tensor> in_place(at::TensorList present, const std::vector<std::int64_t>& places,
                                          std::size_t n) {
    std::vector<at::Tensor> all(4 * n);
    for (std::size_t i = 0; i < places.size(); ++i) all[static_cast<std::size_t>(places[i])] = present[i];
    return all;
  }

  static variable_list forward(AutogradContext* ctx, const at::Tensor& x, at::TensorList present, const Call* call) {
    const std::size_t n = call->scales.size();
    const auto dtype = arithmetic_dtype(x);
    const at::Tensor rows = rows_of(x).to(dtype);  // [R, in]
    const std::vector<at::Tensor> all = in_place(present, call->places, n);
    const at::Tensor a = stacked(std::span(all).subspan(2 * n, n), dtype);
    const at::Tensor low = a.defined() ? at::mm(rows, a.t()) : at::Tensor();  // [R, sum of r]
    variable_list out;
    std::int64_t column = 0;
    for (std::size_t i = 0; i < n; ++i) {
      const at::Tensor &weight = all[i], &bias = all[n + i], &b = all[3 * n + i];
      const std::int64_t width = weight.size(0);
      at::Tensor y;
      if (call->gradients_only) {
        y = at::zeros({1}, rows.options()).expand({rows.size(0), width});
      } else if (b.defined()) {
        // The addition first: the large product then adds onto it while it writes its result anyway.
        const at::Tensor part = low.narrow(1, column, b.size(1)), scaled = b.to(dtype) * call->scales[i];
        y = bias.defined() ? at::addmm(bias.to(dtype), part, scaled.t()) : at::mm(part, scaled.t());
        y.addmm_(rows, weight.to(dtype).t());
      } else {
        y = at::linear(rows, weight.to(dtype), bias.defined() ? bias.to(dtype) : at::Tensor());
      }
      if (b.defined()) column += b.size(1);
      out.push_back(y.to(x.scalar_type()).view(shape_with(x, width)));
    }
    bool keep_x = a.defined();
    for (std::size_t i = 0; i < n; ++i) keep_x = keep_x || all[i].requires_grad();
    variable_list saved{keep_x ? x : at::Tensor(), low};
    saved.insert(saved.end(), present.begin(), present.end());
    ctx->save_for_backward(saved);
    ctx->saved_data["scales"] = call->scales;
    ctx->saved_data["places"] = call->places;
    ctx->saved_data["shape"] = x.sizes().vec();
    ctx->set_materialize_grads(false);
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list kept = ctx->get_saved_variables();
    const std::vector<double> scales = ctx->saved_data["scales"].toDoubleVector();
    const std::vector<std::int64_t> shape = ctx->saved_data["shape"].toIntVector(),
                                    places = ctx->saved_data["places"].toIntVector();
    const std::size_t n = scales.size();
    const at::Tensor &x = kept[0], &low = kept[1];
    const std::vector<at::Tensor> saved = in_place(at::TensorList(kept).slice(2), places, n);
    at::Tensor d_x;
    std::vector<at::Tensor> d_all(4 * n);
    at::ScalarType given = at::kFloat, dtype = at::kFloat;
    std::vector<at::Tensor> d_out(n), d_low(n);
    for (std::size_t i = 0; i < n; ++i) {
      if (!grads[i].defined()) continue;
      given = grads[i].scalar_type();
      dtype = arithmetic_dtype(grads[i]);
      d_out[i] = rows_of(grads[i]).to(dtype);
    }
    const at::Tensor rows = x.defined() ? rows_of(x).to(dtype) : at::Tensor();
    std::vector<at::Tensor> used_a;
    std::int64_t column = 0;
    for (std::size_t i = 0; i < n; ++i) {
      const at::Tensor &a = saved[2 * n + i], &b = saved[3 * n + i];
      if (!b.defined()) continue;
      if (d_out[i].defined()) {
        const at::Tensor part = low.narrow(1, column, b.size(1));
        // Few rows times many columns is the form that is fast, three to five times here.
        d_low[i] = at::mm(b.to(dtype).t() * scales[i], d_out[i].t());  // [r, R]
        d_all[3 * n + i] = at::mm(part.t(), d_out[i]).mul_(scales[i]).t().to(b.scalar_type());
        used_a.push_back(a);
      }
      column += b.size(1);
    }
    const at::Tensor d_lows = stacked(d_low, dtype);  // [sum of r, R]
    if (d_lows.defined()) {
      const at::Tensor d_a = at::mm(d_lows, rows);  // [sum of r, in]
      std::int64_t row = 0;
      for (std::size_t i = 0; i < n; ++i) {
        if (!d_low[i].defined()) continue;
        const at::Tensor& a = saved[2 * n + i];
        d_all[2 * n + i] = d_a.narrow(0, row, a.size(0)).to(a.scalar_type());
        row += a.size(0);
      }
    }
    if (ctx->needs_input_grad(0)) {
      if (d_lows.defined()) d_x = at::mm(d_lows.t(), stacked(used_a, dtype));
      for (std::size_t i = 0; i < n; ++i) {
        if (!d_out[i].defined()) continue;
        const at::Tensor weight = saved[i].to(dtype);
        d_x = d_x.defined() ? d_x.addmm_(d_out[i], weight) : at::mm(d_out[i], weight);
      }
      if (d_x.defined()) d_x = d_x.to(given).view(shape);
    }
    variable_list out{d_x};
    for (std::size_t p = 0; p < places.size(); ++p) {
      const auto place = static_cast<std::size_t>(places[p]);
      const bool weight = place < n, bias = !weight && place < 2 * n;
      const at::Tensor& d = d_out[weight ? place : bias ? place - n : 0];
      if ((weight || bias) && d.defined() && ctx->needs_input_grad(1 + p)) {
        d_all[place] = (weight ? at::mm(d.t(), rows) : d.sum(0)).to(saved[place].scalar_type());
      }
      out.push_back(d_all[place]);
    }
    out.emplace_back();
    return out;
  }
};

}  // namespace

bool cpu_has_fast_bf16() {
#if defined(__x86_64__)
  static const bool fast = __builtin_cpu_supports("avx512bf16") != 0;
  return fast;
#else
  return false;
#endif
}

void disable_broken_amx() {
#if defined(__x86_64__)
  static const bool broken = [] {
    constexpr unsigned features = 7, tiles = 0x1d, palette = 1, has_tiles = 1U << 24;
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (__get_cpuid_count(features, 0, &a, &b, &c, &d) == 0 || (d & has_tiles) == 0) return false;
    return __get_cpuid_count(tiles, palette, &a, &b, &c, &d) == 0 || b == 0;
  }();
  if (broken) ::setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16", /*overwrite=*/0);
#endif
}

at::ScalarType arithmetic_dtype(const at::Tensor& x) {
  const bool narrow = x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kHalf;
  return x.is_cpu() && narrow && !cpu_has_fast_bf16() ? at::kFloat : x.scalar_type();
}

at::Tensor apply(const Linear& linear, const at::Tensor& x) {
  if (kernels::matvec_applies(x, linear.weight, linear.bias)) {
    return kernels::matvec(x, linear.weight, linear.bias).view(shape_with(x, linear.weight.size(0)));
  }
  const auto dtype = arithmetic_dtype(x);
  // A conversion lives only for this product: one matrix at a time is widened, the rest stays mapped.
  const at::Tensor bias = linear.bias.defined() ? linear.bias.to(dtype) : at::Tensor();
  return at::linear(x.to(dtype), linear.weight.to(dtype), bias).to(x.scalar_type());
}

std::vector<at::Tensor> project(std::span<const Linear> linears, std::span<const LoraWeights> added,
                                const at::Tensor& x, bool gradients_only) {
  const std::size_t n = linears.size();
  std::vector<at::Tensor> tensors(4 * n);
  Projections::Call call{std::vector<double>(n, 1.0), {}, gradients_only};
  for (std::size_t i = 0; i < n; ++i) {
    tensors[i] = linears[i].weight;
    tensors[n + i] = linears[i].bias;
    if (added.empty() || !added[i].a.defined()) continue;
    tensors[2 * n + i] = added[i].a;
    tensors[3 * n + i] = added[i].b;
    call.scales[i] = added[i].scale;
  }
  if (kernels::wants_gradient(x) || std::any_of(tensors.begin(), tensors.end(), kernels::wants_gradient)) {
    std::vector<at::Tensor> present;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      if (!tensors[i].defined()) continue;
      present.push_back(tensors[i]);
      call.places.push_back(static_cast<std::int64_t>(i));
    }
    return Projections::apply(x, at::TensorList(present), &call);
  }
  std::vector<at::Tensor> out;
  for (std::size_t i = 0; i < n; ++i) {
    at::Tensor y = apply(linears[i], x);
    if (tensors[2 * n + i].defined())
      y.add_(apply({tensors[3 * n + i], {}}, apply({tensors[2 * n + i], {}}, x)), call.scales[i]);
    out.push_back(y);
  }
  return out;
}

at::Tensor project(const Linear& linear, const at::Tensor& x, bool gradients_only) {
  return project({&linear, 1}, {}, x, gradients_only)[0];
}

}  // namespace tapetune
