#include "adapters/lora/lora.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>

#include <array>

#include "core/error.h"
#include "kernels/grain.h"

namespace tapetune {

namespace {

constexpr std::size_t projection_count = 8;

// The LoRA matrices of a projection, and what DoRA adds to them.
struct LoraLayer {
  LoraWeights weights;
  at::Tensor magnitude;        // [out], DoRA only
  at::Tensor squares;          // [out]: the squared length of each frozen row, DoRA only
  mutable at::Tensor lengths;  // [out]: of each adapted row, where they cannot change any more
};

// ||W + scale b a|| of every row, without W + scale b a: the square of a sum, multiplied out. No gradient flows
// through.
at::Tensor row_lengths(const Linear& frozen, const LoraLayer& lora) {
  const c10::NoGradGuard constant;
  const auto dtype = lora.weights.b.scalar_type();
  const at::Tensor &a = lora.weights.a, &b = lora.weights.b;                      // [r, in], [out, r]
  const at::Tensor across = (at::mm(frozen.weight.to(dtype), a.t()) * b).sum(1);  // [out]
  const at::Tensor own = (at::mm(b, at::mm(a, a.t())) * b).sum(1);                // [out]
  const double scale = lora.weights.scale;
  return (lora.squares + 2 * scale * across + scale * scale * own).clamp_min(0).sqrt();
}

class LoraAdapter final : public Adapter {
 public:
  LoraAdapter(std::int64_t layers, double dropout)
      : lora_layers_(static_cast<std::size_t>(layers) + 1), dropout_(dropout) {}

  LoraLayer& at(std::int64_t layer, Projection which) {
    return lora_layers_[static_cast<std::size_t>(layer)][static_cast<std::size_t>(which)];
  }
  const LoraLayer& at(std::int64_t layer, Projection which) const {
    return lora_layers_[static_cast<std::size_t>(layer)][static_cast<std::size_t>(which)];
  }

  std::vector<at::Tensor> project(const Call& call, const at::Tensor& x) const override {
    if (dropout_ > 0 && call.training != nullptr && call.training->dropout) return project_dropped(call, x);
    std::vector<LoraWeights> added;
    std::vector<Linear> frozen(call.frozen.begin(), call.frozen.end());
    bool dora = false;
    for (std::size_t i = 0; i < frozen.size(); ++i) {
      const LoraLayer& lora = at(call.layer, call.which[i]);
      added.push_back(lora.weights);
      if (lora.magnitude.defined()) {
        dora = true;
        frozen[i].bias.reset();  // comes after the magnitude
      }
    }
    // A magnitude's gradient asks for the values that it scales.
    std::vector<at::Tensor> out = tapetune::project(frozen, added, x, call.gradients_only && !dora);
    for (std::size_t i = 0; dora && i < out.size(); ++i) {
      const LoraLayer& lora = at(call.layer, call.which[i]);
      if (lora.magnitude.defined()) out[i] = with_bias(out[i] * stretch(call.frozen[i], lora, x), call.frozen[i].bias);
    }
    return out;
  }

 private:
  static at::Tensor stretch(const Linear& frozen, const LoraLayer& lora, const at::Tensor& x) {
    // Under InferenceMode nothing trains: what a text's first token found holds for all of them.
    const bool fixed = lora.weights.a.is_inference();
    if (fixed && !lora.lengths.defined()) lora.lengths = row_lengths(frozen, lora);
    return (lora.magnitude / (fixed ? lora.lengths : row_lengths(frozen, lora))).to(x.scalar_type());  // [out]
  }
  static at::Tensor with_bias(const at::Tensor& y, const at::Tensor& bias) {
    return bias.defined() ? y + bias.to(y.scalar_type()) : y;
  }

  // The dropout mask of x ([B, N, in], or flattened tokens [T, in]): 0 or 1 / (1 - dropout). Every number is computed
  // from its sequence, token and feature, so that any part of a batch or of a sequence gets the same.
  at::Tensor kept_inputs(const at::Tensor& x, const Training& training, std::uint64_t place) const {
    const std::int64_t width = x.size(-1), tokens = x.numel() / width;
    const bool flat = x.dim() == 2;
    const std::int64_t length = !flat ? x.size(1) : training.flat_length > 0 ? training.flat_length : tokens;
    const std::int64_t begin = flat ? training.flat_begin : 0;
    const auto dropped = static_cast<std::uint32_t>(dropout_ * 4294967296.0);
    const auto grown = static_cast<float>(1 / (1 - dropout_));
    at::Tensor mask = at::empty(x.sizes(), at::kFloat);
    auto* numbers = mask.mutable_data_ptr<float>();
    at::parallel_for(0, tokens, kernels::grain_of(width), [&](std::int64_t first, std::int64_t last) {
      for (std::int64_t t = first; t < last; ++t) {
        const std::int64_t row = (begin + t) / length, token = training.sequence_rank * length + (begin + t) % length;
        const std::uint64_t seed = draw(draw(training.row_seed(row), place), static_cast<std::uint64_t>(token));
        float* to = numbers + t * width;
        for (std::int64_t i = 0; i < width; i += 2) {  // one draw decides two features
          const std::uint64_t bits = draw(seed, static_cast<std::uint64_t>(i));
          to[i] = static_cast<std::uint32_t>(bits) < dropped ? 0.0F : grown;
          if (i + 1 < width) to[i + 1] = static_cast<std::uint32_t>(bits >> 32) < dropped ? 0.0F : grown;
        }
      }
    });
    return mask;
  }

  // Each LoRA branch drops inputs of its own; the frozen projection sees them all.
  std::vector<at::Tensor> project_dropped(const Call& call, const at::Tensor& x) const {
    std::vector<at::Tensor> out = tapetune::project(call.frozen, {}, x);
    for (std::size_t i = 0; i < out.size(); ++i) {
      const LoraLayer& lora = at(call.layer, call.which[i]);
      if (!lora.weights.a.defined()) continue;
      const std::uint64_t place =
          static_cast<std::uint64_t>(call.layer) * projection_count + static_cast<std::uint64_t>(call.which[i]);
      const at::Tensor kept = kept_inputs(x, *call.training, place);
      const at::Tensor dropped = x * kept.to(x.device(), x.scalar_type());
      const Linear &frozen = call.frozen[i], direction{frozen.weight, {}};
      const auto dtype = x.scalar_type();
      const at::Tensor low =
          at::linear(at::linear(dropped, lora.weights.a.to(dtype)), lora.weights.b.to(dtype)) * lora.weights.scale;
      if (!lora.magnitude.defined()) {
        out[i] = out[i] + low;
        continue;
      }
      const at::Tensor scale = stretch(frozen, lora, x);
      out[i] = out[i] + (scale - 1) * tapetune::project({&direction, 1}, {}, dropped)[0] + scale * low;
    }
    return out;
  }

  std::vector<std::array<LoraLayer, projection_count>> lora_layers_;  // a layer each, and the head
  double dropout_;
};

}  // namespace

double lora_scale(const MethodOptions& options) {
  const auto rank = static_cast<double>(options.rank);
  return options.alpha / (options.rslora ? std::sqrt(rank) : rank);
}

void check_lora(const MethodOptions& options) {
  if (options.rank < 1) fail("method", "rank must be an integer >= 1, but is {}.", options.rank);
}

bool is_adapted(const MethodOptions& options, std::int64_t layer, Projection which) {
  if (std::find(options.targets.begin(), options.targets.end(), which) == options.targets.end()) return false;
  const bool listed = std::find(options.layers.begin(), options.layers.end(), layer) != options.layers.end();
  if (!options.layers.empty() && (which == Projection::head || !listed)) return false;
  const std::string name = module_name(layer, which);
  return std::none_of(options.excluded.begin(), options.excluded.end(),
                      [&](const std::string& excluded) { return name == excluded || name.ends_with("." + excluded); });
}

bool excludes_target(const MethodOptions& options, std::int64_t layers, const std::string& module) {
  MethodOptions all = options, others = options;
  all.excluded.clear();
  others.excluded = {module};
  for (std::int64_t layer = 0; layer < layers; ++layer) {
    for (const Projection which : options.targets) {
      if (is_adapted(all, layer, which) && !is_adapted(others, layer, which)) return true;
    }
  }
  return false;
}

void make_lora(ModelBuilder& model) {
  const MethodOptions& options = model.options;
  const std::int64_t layers = model.config.layers;
  for (const std::int64_t layer : options.layers) {
    if (layer >= layers) {
      fail("method", "layers_to_transform has layer {}, but the model has {} (0 to {}).", layer, layers, layers - 1);
    }
  }
  for (const std::string& module : options.excluded) {
    if (excludes_target(options, layers, module)) continue;
    fail("method", "exclude_modules has \"{}\", which is not among the targets in layers 0 to {}; correct or drop it.",
         module, layers - 1);
  }
  const double scale = lora_scale(options);
  const auto adapter = std::make_shared<LoraAdapter>(layers, options.dropout);
  const std::size_t before = model.components.parameters.size();
  const auto add = [&](std::int64_t layer, Projection which, const Linear& frozen) {
    if (!is_adapted(options, layer, which)) return;
    const std::int64_t out = frozen.weight.size(0), in = frozen.weight.size(1);
    const std::string name = module_name(layer, which);
    // Kaiming's uniform start with a = sqrt(5), as everywhere: within 1 / sqrt(in).
    const double bound = 1.0 / std::sqrt(static_cast<double>(in));
    const at::Tensor a = at::empty({options.rank, in}, at::kFloat).uniform_(-bound, bound, model.generator);
    LoraLayer& lora = adapter->at(layer, which);
    lora.weights.a = model.train(name + ".lora_A.weight", a, Owner::adapter, "low-rank");
    lora.weights.b = model.train(name + ".lora_B.weight", at::zeros({out, options.rank}), Owner::adapter, "low-rank");
    lora.weights.scale = scale;
    if (!options.dora) return;
    const auto dtype = c10::typeMetaToScalarType(model.trained_options.dtype());
    lora.squares = frozen.weight.detach().to(dtype).square().sum(1);
    lora.magnitude = model.train(name + ".lora_magnitude_vector", lora.squares.sqrt(), Owner::adapter, "low-rank");
  };
  for (std::int64_t i = 0; i < layers; ++i) {
    const auto frozen = linears(std::as_const(model.weights.layers[static_cast<std::size_t>(i)]));
    for (std::size_t p = 0; p < frozen.size(); ++p) add(i, static_cast<Projection>(p), *frozen[p]);
  }
  add(layers, Projection::head, model.weights.head);
  if (model.components.parameters.size() == before && (!options.layers.empty() || !options.excluded.empty())) {
    fail("method", "layers_to_transform and exclude_modules leave no projection with LoRA matrices; widen them.");
  }
  model.components.adapter = adapter;
}

}  // namespace tapetune
