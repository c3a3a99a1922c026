// IA3 (arXiv 2205.05638, section 3.3): learned vectors scale the keys, the values and the inner activations of the
// feed-forward. As in PEFT, other projections may be scaled too.
#include "ia3.h"

#include <ATen/ATen.h>
#include <adapters/component.h>
#include <adapters/peft.h>

#include <algorithm>

using namespace tapetune;

namespace {

constexpr const char* vector_name = "ia3_l";  // after the module's name, as in PEFT

// Keys and values are what their projections give; the inner activations are what the last one of the feed-forward
// gets.
bool scales_input(Projection which) { return which == Projection::down; }

class Ia3Adapter final : public Adapter {
 public:
  // Projections that are not scaled have none.
  at::Tensor& vector(std::int64_t layer, Projection which) { return vectors_[{layer, which}]; }

  std::vector<at::Tensor> project(const Call& call, const at::Tensor& x) const override {
    // In f32 also in a bf16 model, where 1 + 0.001 would be 1.
    const auto scaled = [](const at::Tensor& t, const at::Tensor& l) { return (t * l.flatten()).to(t.scalar_type()); };
    std::vector<at::Tensor> out;
    for (std::size_t i = 0; i < call.which.size(); ++i) {
      const auto found = vectors_.find({call.layer, call.which[i]});
      if (found == vectors_.end()) {
        out.push_back(tapetune::project(call.frozen[i], x, call.gradients_only));
      } else if (scales_input(call.which[i])) {
        out.push_back(tapetune::project(call.frozen[i], scaled(x, found->second), call.gradients_only));
      } else {
        out.push_back(scaled(tapetune::project(call.frozen[i], x), found->second));  // its gradient needs the values
      }
    }
    return out;
  }

  // (diag(l) W) x + l b = l (W x + b), and W diag(l) x = W (l x).
  std::optional<Merge> merge(std::string_view base_tensor, const FindTrained& trained) const override {
    const std::size_t dot = base_tensor.rfind('.');
    const std::string_view module = base_tensor.substr(0, dot);
    const bool is_bias = base_tensor.substr(dot + 1) == "bias";
    Merge merge{{fmt::format("{}.{}", module, vector_name)}, {}};
    const StoredTensor* l = trained(merge.uses[0]);
    const bool input = l != nullptr && l->entry.shape[0] == 1;
    if (l == nullptr || (input && is_bias)) return std::nullopt;
    merge.apply = [l, input, is_bias](const at::Tensor& rows, std::int64_t begin) {
      const at::Tensor scale =
          input ? rows_from(*l, 0, 1) : rows_from(*l, begin, rows.size(0));  // [1, in] or [rows, 1]
      return rows * (is_bias ? scale.flatten() : scale);
    };
    return merge;
  }

  double saved_numbers(std::int64_t layer) const override {
    double numbers = 0;  // what is scaled, if it is no input
    for (const auto& [place, l] : vectors_) {
      if (place.first == layer && !scales_input(place.second)) numbers += static_cast<double>(l.numel());
    }
    return numbers;
  }

 private:
  std::map<std::pair<std::int64_t, Projection>, at::Tensor> vectors_;
};

std::shared_ptr<const Adapter> make_ia3(const Settings& settings, ModelBuilder& model) {
  const auto adapter = std::make_shared<Ia3Adapter>();
  const std::vector<std::string> targets = settings.words("targets");
  for_each_projection(model.weights, [&](std::int64_t layer, Projection which, const Linear& frozen) {
    if (std::ranges::find(targets, projection_name(which)) == targets.end()) return;
    const std::int64_t out = frozen.weight.size(0), in = frozen.weight.size(1);
    const at::Tensor ones = scales_input(which) ? at::ones({1, in}) : at::ones({out, 1});  // PEFT's shapes
    adapter->vector(layer, which) =
        model.train(fmt::format("{}.{}", module_name(layer, which), vector_name), ones, Owner::adapter, "scales");
  });
  return adapter;
}

// PEFT's IA3Config, both ways.
Json ia3_to_peft(const Settings& settings) {
  Json config{{"target_modules", Json::array()}, {"feedforward_modules", Json::array()}, {"fan_in_fan_out", false}};
  for (const std::string& target : settings.words("targets")) {
    config["target_modules"].push_back(target + "_proj");
    if (scales_input(*find_projection(target))) config["feedforward_modules"].push_back(target + "_proj");
  }
  return config;
}

std::vector<std::string> ia3_from_peft(const Json&, const StoredTensors& stored, const ModelConfig& model,
                                       const std::string& where) {
  // PEFT's target_modules may be a regular expression; the tensors of the first layer say what it matched.
  std::vector<std::string_view> targets;
  for (int i = 0; i < static_cast<int>(Projection::head) && model.layers > 0; ++i) {
    const auto which = static_cast<Projection>(i);
    const auto found = stored.find(name_on_disk(fmt::format("{}.{}", module_name(0, which), vector_name)));
    if (found == stored.end()) continue;
    targets.push_back(projection_name(which));
    if ((found->second.entry.shape[0] == 1) != scales_input(which)) {
      fail("adapter", "{}: feedforward_modules must be [\"down_proj\"]; merge the adapter in PEFT.", where);
    }
  }
  return {fmt::format("targets={}", fmt::join(targets, ","))};
}

}  // namespace

void add_ia3() {
  AdapterComponent ia3;
  ia3.name = "ia3";
  ia3.summary = "learned vectors that scale keys, values and inner activations";
  ia3.keys = {{.name = "targets",
               .help = "projections that are scaled: q,k,v,o,gate,up at their output, down at its input",
               .type = Key::Type::words,
               .fallback = Json::array({"k", "v", "down"}),
               .words = {"q", "k", "v", "o", "gate", "up", "down"}}};
  ia3.make = make_ia3;
  ia3.peft_type = "IA3";
  ia3.to_peft = ia3_to_peft;
  ia3.from_peft = ia3_from_peft;
  adapter_components().add(std::move(ia3));
}
