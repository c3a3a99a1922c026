#include "adapters/linear/lora/lora.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>

#include <array>

#include "core/error.h"
#include "kernels/grain.h"

namespace tapetune {

namespace {

constexpr std::size_t projection_count = 8;

// After the module's name, as PEFT has them.
constexpr const char *a_name = "lora_A.weight", *b_name = "lora_B.weight", *magnitude_name = "lora_magnitude_vector";

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
  LoraAdapter(std::int64_t layers, double dropout, double scale)
      : lora_layers_(static_cast<std::size_t>(layers) + 1), dropout_(dropout), scale_(scale) {}

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

  // As PEFT merges: the product in f32 times the scale, then the frozen rows, and one rounding at the end.
  std::optional<Merge> merge(std::string_view base_tensor, const FindTrained& trained) const override {
    constexpr std::string_view weight = "weight";
    if (!base_tensor.ends_with(weight)) return std::nullopt;
    const std::string module(base_tensor.substr(0, base_tensor.size() - weight.size()));
    Merge merge{{module + a_name, module + b_name}, {}};
    const StoredTensor *a = trained(merge.uses[0]), *b = trained(merge.uses[1]);
    if (a == nullptr || b == nullptr) return std::nullopt;
    const StoredTensor* magnitude = trained(module + magnitude_name);
    if (magnitude != nullptr) merge.uses.push_back(module + magnitude_name);
    merge.apply = [a, b, magnitude, scale = scale_](const at::Tensor& rows, std::int64_t begin) {
      const at::ScalarType work = rows.scalar_type();
      const std::int64_t count = rows.size(0);
      const at::Tensor low = rows_from(*b, begin, count).to(work);  // [count, r]
      at::Tensor sum = at::mm(low, rows_from(*a, 0, a->entry.shape[0]).to(work)).mul_(scale).add_(rows);
      if (magnitude != nullptr) {
        const at::Tensor lengths = at::linalg_vector_norm(sum, 2, at::IntArrayRef({1}));  // [count]
        sum.mul_((rows_from(*magnitude, begin, count).to(work) / lengths).unsqueeze(1));
      }
      return sum;
    };
    return merge;
  }

  bool draws() const override { return dropout_ > 0; }

  double saved_numbers(std::int64_t layer) const override {
    double numbers = 0;
    for (const LoraLayer& lora : lora_layers_[static_cast<std::size_t>(layer)]) {
      if (lora.weights.a.defined()) numbers += static_cast<double>(lora.weights.a.size(0));
    }
    return numbers;
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
      out[i] = out[i] + (scale - 1) * tapetune::project(direction, dropped) + scale * low;
    }
    return out;
  }

  std::vector<std::array<LoraLayer, projection_count>> lora_layers_;  // a layer each, and the head
  double dropout_, scale_;
};

// Which projections have LoRA matrices.
struct LoraPlaces {
  std::vector<Projection> targets;
  std::vector<std::int64_t> layers;   // empty: all
  std::vector<std::string> excluded;  // names, or their ends

  explicit LoraPlaces(const Settings& settings)
      : layers(settings.wholes("layers_to_transform")), excluded(settings.words("exclude_modules")) {
    for (const std::string& name : settings.words("targets")) targets.push_back(*find_projection(name));
  }

  // layer: the number of layers for the head.
  bool has(std::int64_t layer, Projection which) const {
    if (std::ranges::find(targets, which) == targets.end()) return false;
    const bool listed = std::ranges::find(layers, layer) != layers.end();
    if (!layers.empty() && (which == Projection::head || !listed)) return false;
    const std::string name = module_name(layer, which);
    return std::ranges::none_of(excluded,
                                [&](const std::string& each) { return name == each || name.ends_with("." + each); });
  }

  // Whether an entry of exclude_modules leaves out a projection that would have LoRA matrices without it.
  bool excludes_target(std::int64_t model_layers, const std::string& module) const {
    LoraPlaces all = *this, others = *this;
    all.excluded.clear();
    others.excluded = {module};
    for (std::int64_t layer = 0; layer < model_layers; ++layer) {
      for (const Projection which : targets) {
        if (all.has(layer, which) && !others.has(layer, which)) return true;
      }
    }
    return false;
  }
};

std::string_view without_proj(std::string_view name) {  // transformers' own names
  if (name.ends_with("_proj")) name.remove_suffix(5);
  return name;
}

void check_module(std::string_view module) {
  const std::string_view last = module.substr(module.rfind('.') + 1);
  const bool known = last == "lm_head" || (last.ends_with("_proj") && find_projection(without_proj(last)));
  if (known) return;
  fail("method", "exclude_modules must be projections, as q_proj or layers.3.self_attn.q_proj, but is \"{}\".", module);
}

double lora_scale(const Settings& settings) {
  const auto rank = static_cast<double>(settings.whole("rank"));
  return settings.number("alpha") / (settings.flag("rslora") ? std::sqrt(rank) : rank);
}

std::shared_ptr<const Adapter> make_lora(const Settings& settings, ModelBuilder& model) {
  const std::int64_t layers = model.config.layers, rank = settings.whole("rank");
  const LoraPlaces places(settings);
  for (const std::int64_t layer : places.layers) {
    if (layer >= layers) {
      fail("method", "layers_to_transform has layer {}, but the model has {} (0 to {}).", layer, layers, layers - 1);
    }
  }
  for (const std::string& module : places.excluded) {
    if (places.excludes_target(layers, module)) continue;
    fail("method", "exclude_modules has \"{}\", which is not among the targets in layers 0 to {}; correct or drop it.",
         module, layers - 1);
  }
  const bool dora = settings.flag("dora");
  const double scale = lora_scale(settings);
  const auto adapter = std::make_shared<LoraAdapter>(layers, settings.number("dropout"), scale);
  const std::size_t before = model.components.parameters.size();
  const auto add = [&](std::int64_t layer, Projection which, const Linear& frozen) {
    if (!places.has(layer, which)) return;
    const std::int64_t out = frozen.weight.size(0), in = frozen.weight.size(1);
    const std::string module = module_name(layer, which) + ".";
    const auto train = [&](const char* name, const at::Tensor& start) {
      return model.train(module + name, start, Owner::adapter, "low-rank");
    };
    // Kaiming's uniform start with a = sqrt(5), as everywhere: within 1 / sqrt(in).
    const double bound = 1.0 / std::sqrt(static_cast<double>(in));
    LoraLayer& lora = adapter->at(layer, which);
    lora.weights.a = train(a_name, at::empty({rank, in}, at::kFloat).uniform_(-bound, bound, model.generator));
    lora.weights.b = train(b_name, at::zeros({out, rank}));
    lora.weights.scale = scale;
    if (!dora) return;
    const auto dtype = c10::typeMetaToScalarType(model.trained_options.dtype());
    lora.squares = frozen.weight.detach().to(dtype).square().sum(1);
    lora.magnitude = train(magnitude_name, lora.squares.sqrt());
  };
  for_each_projection(model.weights, add);
  if (model.components.parameters.size() == before && !(places.layers.empty() && places.excluded.empty())) {
    fail("method", "layers_to_transform and exclude_modules leave no projection with LoRA matrices; widen them.");
  }
  return adapter;
}

std::vector<Key> lora_keys() {
  constexpr double huge = 1e12;
  std::vector<Key> keys(8);
  keys[0] = {"rank", "rank of the LoRA matrices", Key::Type::whole, 8, 1, 65536, "an integer >= 1"};
  keys[1] = {"alpha",
             "scale of B A: alpha / rank, with rslora alpha / sqrt(rank)",
             Key::Type::number,
             16.0,
             1e-12,
             huge,
             "a number above 0"};
  keys[2] = {"dropout",
             "dropout on the input of the LoRA matrices",
             Key::Type::number,
             0.0,
             0,
             0.999999,
             "a number from 0 to below 1"};
  keys[3] = {"targets",
             "projections with LoRA matrices: q,k,v,o,gate,up,down,lm_head",
             Key::Type::words,
             Json::array({"q", "k", "v", "o"}),
             0,
             0,
             "",
             {"q", "k", "v", "o", "gate", "up", "down", "lm_head"},
             without_proj};
  keys[4] = {"layers_to_transform",
             "layers with LoRA matrices, as 0,1,2 (default: all; lm_head has none where it is set)",
             Key::Type::wholes,
             Json(),
             0,
             1 << 20,
             "a list of layer numbers"};
  keys[5] = {"exclude_modules",
             "targets without LoRA matrices, as q_proj or layers.3.self_attn.q_proj",
             Key::Type::words,
             Json(),
             0,
             0,
             "",
             {},
             nullptr,
             check_module};
  keys[6] = {"rslora", "rank-stabilized LoRA (rsLoRA)", Key::Type::flag, false};
  keys[7] = {"dora", "DoRA: magnitude and direction trained separately", Key::Type::flag, false};
  return keys;
}

Json lora_to_peft(const Settings& settings) {
  const LoraPlaces places(settings);
  Json config, targets = Json::array();
  config["r"] = settings.whole("rank");
  config["lora_alpha"] = settings.number("alpha");
  config["lora_dropout"] = settings.number("dropout");
  config["use_rslora"] = settings.flag("rslora");
  config["use_dora"] = settings.flag("dora");
  config["bias"] = "none";
  config["fan_in_fan_out"] = false;
  for (const Projection which : places.targets) {
    targets.push_back(which == Projection::head ? "lm_head" : fmt::format("{}_proj", projection_name(which)));
  }
  config["target_modules"] = targets;
  if (!places.layers.empty()) config["layers_to_transform"] = places.layers;
  if (!places.excluded.empty()) config["exclude_modules"] = places.excluded;
  return config;
}

// Earlier versions trained with entries of exclude_modules that match nothing, which a new adapter may not have.
void mend_lora(Settings& settings, const ModelConfig& model) {
  const LoraPlaces places(settings);
  std::vector<std::string> kept;
  for (const std::string& module : places.excluded) {
    if (places.excludes_target(model.layers, module)) kept.push_back(module);
  }
  settings.values["exclude_modules"] = kept.empty() ? Json() : Json(kept);
}

void for_all_layers(Settings& settings) {
  settings.values["layers_to_transform"] = settings.values["exclude_modules"] = Json();
}

std::vector<Problem> check_lora(const Settings& settings, const RecipeFacts& facts) {
  if (!settings.flag("dora") || !facts.base_trains) return {};
  return {{"dora", "needs frozen weights, but train_also has all of them; drop one of the two."}};
}

}  // namespace

AdapterComponent lora_component() {
  AdapterComponent component;
  component.name = "lora";
  component.summary = "LoRA matrices beside chosen projections";
  component.keys = lora_keys();
  component.make = make_lora;
  component.chosen_by = "rank";
  component.not_chosen = "has no LoRA matrices unless it is given a rank; add rank=8, or drop the settings of LoRA.";
  component.peft_type = "LORA";
  component.to_peft = lora_to_peft;
  component.peft_ties = true;
  component.from_peft = lora_from_peft;
  component.mend_earlier = mend_lora;
  component.for_all_layers = for_all_layers;
  component.check = check_lora;
  return component;
}

}  // namespace tapetune
