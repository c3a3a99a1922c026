#include "adapters/lora/lora.h"

#include <ATen/CPUGeneratorImpl.h>

#include <array>

#include "core/error.h"

namespace tapetune {

namespace {

constexpr std::size_t projection_count = 8;

struct Pair {
  LowRank low;
  at::Tensor magnitude;        // [out], DoRA only
  at::Tensor squares;          // [out]: the squared length of each frozen row, DoRA only
  mutable at::Tensor lengths;  // [out]: of each adapted row, where they cannot change any more
};

// ||W + scale b a|| of every row, without W + scale b a: the square of a sum, multiplied out. No gradient flows
// through.
at::Tensor row_lengths(const Linear& frozen, const Pair& pair) {
  const c10::NoGradGuard constant;
  const auto dtype = pair.low.b.scalar_type();
  const at::Tensor &a = pair.low.a, &b = pair.low.b;                              // [r, in], [out, r]
  const at::Tensor across = (at::mm(frozen.weight.to(dtype), a.t()) * b).sum(1);  // [out]
  const at::Tensor own = (at::mm(b, at::mm(a, a.t())) * b).sum(1);                // [out]
  const double scale = pair.low.scale;
  return (pair.squares + 2 * scale * across + scale * scale * own).clamp_min(0).sqrt();
}

class LowRankSeam final : public LinearSeam {
 public:
  LowRankSeam(std::int64_t layers, double dropout) : pairs_(static_cast<std::size_t>(layers) + 1), dropout_(dropout) {}

  Pair& at(std::int64_t layer, Projection which) {
    return pairs_[static_cast<std::size_t>(layer)][static_cast<std::size_t>(which)];
  }
  const Pair& at(std::int64_t layer, Projection which) const {
    return pairs_[static_cast<std::size_t>(layer)][static_cast<std::size_t>(which)];
  }

  std::vector<at::Tensor> project(const Call& call, const at::Tensor& x) const override {
    if (dropout_ > 0 && call.training != nullptr && call.training->dropout) return project_dropped(call, x);
    std::vector<LowRank> added;
    std::vector<Linear> frozen(call.frozen.begin(), call.frozen.end());
    bool dora = false;
    for (std::size_t i = 0; i < frozen.size(); ++i) {
      const Pair& pair = at(call.layer, call.which[i]);
      added.push_back(pair.low);
      if (pair.magnitude.defined()) {
        dora = true;
        frozen[i].bias.reset();  // comes after the magnitude
      }
    }
    // A magnitude's gradient asks for the values that it scales.
    std::vector<at::Tensor> out = tapetune::project(frozen, added, x, call.graph_only && !dora);
    for (std::size_t i = 0; dora && i < out.size(); ++i) {
      const Pair& pair = at(call.layer, call.which[i]);
      if (pair.magnitude.defined()) out[i] = with_bias(out[i] * stretch(call.frozen[i], pair, x), call.frozen[i].bias);
    }
    return out;
  }

  std::vector<at::Tensor> trained(std::int64_t layer) const override {
    std::vector<at::Tensor> all;
    for (const Pair& pair : pairs_[static_cast<std::size_t>(layer)]) {
      for (const at::Tensor& t : {pair.low.a, pair.low.b, pair.magnitude}) {
        if (t.defined()) all.push_back(t);
      }
    }
    return all;
  }

 private:
  static at::Tensor stretch(const Linear& frozen, const Pair& pair, const at::Tensor& x) {
    // Under InferenceMode nothing trains: what a text's first token found holds for all of them.
    const bool fixed = pair.low.a.is_inference();
    if (fixed && !pair.lengths.defined()) pair.lengths = row_lengths(frozen, pair);
    return (pair.magnitude / (fixed ? pair.lengths : row_lengths(frozen, pair))).to(x.scalar_type());  // [out]
  }
  static at::Tensor with_bias(const at::Tensor& y, const at::Tensor& bias) {
    return bias.defined() ? y + bias.to(y.scalar_type()) : y;
  }

  // What is left of the inputs, and how much it grows for that: 0 or 1 / (1 - dropout).
  at::Tensor kept_inputs(const at::Tensor& x, const Training& training, const at::Generator& generator) const {
    std::vector<std::int64_t> shape = x.sizes().vec();
    const bool spread = training.parts > 1 && x.dim() == 3;
    if (spread) shape[1] *= training.parts;
    const at::Tensor all = at::empty(shape, at::kFloat).bernoulli_(1 - dropout_, generator).div_(1 - dropout_);
    return spread ? all.narrow(1, training.part * x.size(1), x.size(1)) : all;
  }

  // Each pair leaves out inputs of its own; the frozen projection sees them all.
  std::vector<at::Tensor> project_dropped(const Call& call, const at::Tensor& x) const {
    std::vector<at::Tensor> out = tapetune::project(call.frozen, {}, x);
    for (std::size_t i = 0; i < out.size(); ++i) {
      const Pair& pair = at(call.layer, call.which[i]);
      if (!pair.low.a.defined()) continue;
      // The same draw when the layer is computed again for its gradients.
      const std::uint64_t draw = call.training->seed * 0x9E3779B97F4A7C15U +
                                 static_cast<std::uint64_t>(call.layer) * projection_count +
                                 static_cast<std::uint64_t>(call.which[i]);
      const at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(draw);
      const at::Tensor kept = kept_inputs(x, *call.training, generator);
      const at::Tensor dropped = x * kept.to(x.device(), x.scalar_type());
      const Linear &frozen = call.frozen[i], direction{frozen.weight, {}};
      const auto dtype = x.scalar_type();
      const at::Tensor low =
          at::linear(at::linear(dropped, pair.low.a.to(dtype)), pair.low.b.to(dtype)) * pair.low.scale;
      if (!pair.magnitude.defined()) {
        out[i] = out[i] + low;
        continue;
      }
      const at::Tensor scale = stretch(frozen, pair, x);
      out[i] = out[i] + (scale - 1) * tapetune::project({&direction, 1}, {}, dropped)[0] + scale * low;
    }
    return out;
  }

  std::vector<std::array<Pair, projection_count>> pairs_;  // a layer each, and the head
  double dropout_;
};

}  // namespace

double low_rank_scale(const MethodOptions& options) {
  const auto rank = static_cast<double>(options.rank);
  return options.alpha / (options.rslora ? std::sqrt(rank) : rank);
}

void check_low_rank(const MethodOptions& options) {
  if (options.rank < 1) fail("method", "rank must be a whole number from 1 on, but is {}.", options.rank);
}

void inject_low_rank(Injection& model) {
  const MethodOptions& options = model.options;
  const std::int64_t layers = model.config.layers;
  const double scale = low_rank_scale(options);
  const auto seam = std::make_shared<LowRankSeam>(layers, options.dropout);
  const auto add = [&](std::int64_t layer, Projection which, const Linear& frozen) {
    if (std::find(options.targets.begin(), options.targets.end(), which) == options.targets.end()) return;
    const std::int64_t out = frozen.weight.size(0), in = frozen.weight.size(1);
    const std::string name = module_name(layer, which);
    // Kaiming's uniform start with a = sqrt(5), as everywhere: within 1 / sqrt(in).
    const double bound = 1.0 / std::sqrt(static_cast<double>(in));
    const at::Tensor a = at::empty({options.rank, in}, at::kFloat).uniform_(-bound, bound, model.generator);
    Pair& pair = seam->at(layer, which);
    pair.low.a = model.train(name + ".lora_A.weight", a);
    pair.low.b = model.train(name + ".lora_B.weight", at::zeros({out, options.rank}));
    pair.low.scale = scale;
    if (!options.dora) return;
    const auto dtype = c10::typeMetaToScalarType(model.trained_options.dtype());
    pair.squares = frozen.weight.detach().to(dtype).square().sum(1);
    pair.magnitude = model.train(name + ".lora_magnitude_vector", pair.squares.sqrt());
  };
  for (std::int64_t i = 0; i < layers; ++i) {
    const auto frozen = linears(std::as_const(model.weights.layers[static_cast<std::size_t>(i)]));
    for (std::size_t p = 0; p < frozen.size(); ++p) add(i, static_cast<Projection>(p), *frozen[p]);
  }
  add(layers, Projection::head, model.weights.head);
  model.seams.linear = seam;
}

}  // namespace tapetune
