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
at::Tensor stacked(const std::vector<at::Tensor>& parts, at::ScalarType dtype) {
  std::vector<at::Tensor> defined;
  for (const at::Tensor& part : parts) {
    if (part.defined()) defined.push_back(part.to(dtype));
  }
  return defined.empty() ? at::Tensor() : defined.size() == 1 ? defined.front() : at::cat(defined);
}

// The tensors of one projection, or their gradients; undefined ones are not there.
struct Tensors {
  at::Tensor weight, bias;  // [out, in], [out]
  at::Tensor a, b;          // [r, in], [out, r]
};
using Member = at::Tensor Tensors::*;
constexpr Member members[] = {&Tensors::weight, &Tensors::bias, &Tensors::a, &Tensors::b};

std::vector<at::Tensor> all_of(const std::vector<Tensors>& projections, Member member) {
  std::vector<at::Tensor> all;
  all.reserve(projections.size());
  for (const Tensors& each : projections) all.push_back(each.*member);
  return all;
}

// Autograd takes no undefined tensors: those that exist come as a list, with their places.
struct Place {
  std::size_t projection;
  Member member;
};

struct Projections : Function<Projections> {
  struct Call : torch::CustomClassHolder {
    std::vector<double> scales;
    std::vector<Place> places;
    bool gradients_only = false;

    std::vector<Tensors> in_place(at::TensorList present) const {
      std::vector<Tensors> all(scales.size());
      for (std::size_t i = 0; i < places.size(); ++i) all[places[i].projection].*places[i].member = present[i];
      return all;
    }
  };

  static variable_list forward(AutogradContext* ctx, const at::Tensor& x, at::TensorList present,
                               const c10::intrusive_ptr<Call>* given) {
    const Call& call = **given;
    const auto dtype = arithmetic_dtype(x);
    const at::Tensor rows = rows_of(x).to(dtype);  // [R, in]
    const std::vector<Tensors> projections = call.in_place(present);
    const at::Tensor a = stacked(all_of(projections, &Tensors::a), dtype);
    const at::Tensor low = a.defined() ? at::mm(rows, a.t()) : at::Tensor();  // [R, sum of r]
    variable_list out;
    std::int64_t column = 0;
    bool keep_x = a.defined();
    for (std::size_t i = 0; i < projections.size(); ++i) {
      const auto& [weight, bias, own_a, b] = projections[i];
      const std::int64_t width = weight.size(0);
      keep_x = keep_x || weight.requires_grad();
      at::Tensor y;
      if (call.gradients_only) {
        y = at::zeros({1}, rows.options()).expand({rows.size(0), width});
      } else if (b.defined()) {
        // The addition first: the large product then adds onto it while it writes its result anyway.
        const at::Tensor part = low.narrow(1, column, b.size(1)), scaled = b.to(dtype) * call.scales[i];
        y = bias.defined() ? at::addmm(bias.to(dtype), part, scaled.t()) : at::mm(part, scaled.t());
        y.addmm_(rows, weight.to(dtype).t());
      } else {
        y = at::linear(rows, weight.to(dtype), bias.defined() ? bias.to(dtype) : at::Tensor());
      }
      if (b.defined()) column += b.size(1);
      out.push_back(y.to(x.scalar_type()).view(shape_with(x, width)));
    }
    variable_list saved{keep_x ? x : at::Tensor(), low};
    saved.insert(saved.end(), present.begin(), present.end());
    ctx->save_for_backward(saved);
    ctx->saved_data["call"] = c10::IValue::make_capsule(*given);
    ctx->saved_data["shape"] = x.sizes().vec();
    ctx->set_materialize_grads(false);
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list kept = ctx->get_saved_variables();
    const auto call = c10::static_intrusive_pointer_cast<Call>(ctx->saved_data["call"].toCapsule());
    const std::vector<std::int64_t> shape = ctx->saved_data["shape"].toIntVector();
    const at::Tensor &x = kept[0], &low = kept[1];
    const std::vector<Tensors> projections = call->in_place(at::TensorList(kept).slice(2));
    const std::size_t n = projections.size();
    std::vector<Tensors> d(n);
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
      const at::Tensor& b = projections[i].b;
      if (!b.defined()) continue;
      if (d_out[i].defined()) {
        const at::Tensor part = low.narrow(1, column, b.size(1));
        // Few rows times many columns is the form that is fast, three to five times here.
        d_low[i] = at::mm(b.to(dtype).t() * call->scales[i], d_out[i].t());  // [r, R]
        d[i].b = at::mm(part.t(), d_out[i]).mul_(call->scales[i]).t().to(b.scalar_type());
        used_a.push_back(projections[i].a);
      }
      column += b.size(1);
    }
    const at::Tensor d_lows = stacked(d_low, dtype);  // [sum of r, R]
    if (d_lows.defined()) {
      const at::Tensor d_a = at::mm(d_lows, rows);  // [sum of r, in]
      std::int64_t row = 0;
      for (std::size_t i = 0; i < n; ++i) {
        if (!d_low[i].defined()) continue;
        const at::Tensor& a = projections[i].a;
        d[i].a = d_a.narrow(0, row, a.size(0)).to(a.scalar_type());
        row += a.size(0);
      }
    }
    at::Tensor d_x;
    if (ctx->needs_input_grad(0)) {
      if (d_lows.defined()) d_x = at::mm(d_lows.t(), stacked(used_a, dtype));
      for (std::size_t i = 0; i < n; ++i) {
        if (!d_out[i].defined()) continue;
        const at::Tensor weight = projections[i].weight.to(dtype);
        d_x = d_x.defined() ? d_x.addmm_(d_out[i], weight) : at::mm(d_out[i], weight);
      }
      if (d_x.defined()) d_x = d_x.to(given).view(shape);
    }
    variable_list out{d_x};
    for (std::size_t p = 0; p < call->places.size(); ++p) {
      const auto [i, member] = call->places[p];
      at::Tensor& own = d[i].*member;
      const bool wanted = d_out[i].defined() && ctx->needs_input_grad(1 + p);
      const at::ScalarType stored = (projections[i].*member).scalar_type();
      if (wanted && member == &Tensors::weight) own = at::mm(d_out[i].t(), rows).to(stored);
      if (wanted && member == &Tensors::bias) own = d_out[i].sum(0).to(stored);
      out.push_back(own);
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
  const auto call = c10::make_intrusive<Projections::Call>();
  call->gradients_only = gradients_only;
  std::vector<Tensors> projections;
  for (std::size_t i = 0; i < linears.size(); ++i) {
    const bool adds = !added.empty() && added[i].a.defined();
    projections.push_back(
        {linears[i].weight, linears[i].bias, adds ? added[i].a : at::Tensor(), adds ? added[i].b : at::Tensor()});
    call->scales.push_back(adds ? added[i].scale : 1.0);
  }
  std::vector<at::Tensor> present;
  for (const Member member : members) {
    for (std::size_t i = 0; i < projections.size(); ++i) {
      if (!(projections[i].*member).defined()) continue;
      present.push_back(projections[i].*member);
      call->places.push_back({i, member});
    }
  }
  if (kernels::wants_gradient(x) || std::ranges::any_of(present, kernels::wants_gradient)) {
    return Projections::apply(x, at::TensorList(present), &call);
  }
  std::vector<at::Tensor> out;
  for (std::size_t i = 0; i < projections.size(); ++i) {
    at::Tensor y = apply(linears[i], x);
    const auto& [weight, bias, a, b] = projections[i];
    if (a.defined()) y.add_(apply({b, {}}, apply({a, {}}, x)), call->scales[i]);
    out.push_back(y);
  }
  return out;
}

at::Tensor project(const Linear& linear, const at::Tensor& x, bool gradients_only) {
  return project({&linear, 1}, {}, x, gradients_only)[0];
}

}  // namespace tapetune
