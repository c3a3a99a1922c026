#include "adapters/tape/tape.h"

#include "adapters/lora/lora.h"
#include "core/error.h"
#include "kernels/position.h"
#include "model/rotary.h"

namespace tapetune {

namespace {

// TAPE's matrices of one layer. They act on channels only and alike on cosines and sines of every frequency; that is
// what equivariance asks for.
struct TapeLayer {
  at::Tensor mix;   // [K, H]: attention outputs into channels
  at::Tensor up;    // [I, K]
  at::Tensor gate;  // [I, hidden], reads the MLP's output
  at::Tensor down;  // [K, I]
};

// What mixes the H attention outputs into K channels. Per head, only the sum of a row of W acts, on the mean of the
// heads that share the channel.
at::Tensor mixing(const at::Tensor& w, Mix mix) {
  if (mix == Mix::full) return w;
  const std::int64_t channels = w.size(0), heads = w.size(1), group = heads / channels;
  const at::Tensor share = at::eye(channels, w.options().requires_grad(false)).repeat_interleave(group, 1) /
                           static_cast<double>(group);  // [K, H]
  return w.sum(1, true) * share;
}

// e <- (1 + W_down diag(g) W_up) (e + mix(attended)), g = silu(W_gate mlp_output).
at::Tensor updated(const TapeLayer& tape, Mix mix, const at::Tensor& position, const at::Tensor& attended,
                   const at::Tensor& mlp_output) {
  const auto dtype = tape.up.scalar_type();
  const std::int64_t channels = tape.up.size(1), inner = tape.up.size(0);
  const at::Tensor gate = at::silu(at::linear(mlp_output.to(dtype), tape.gate));  // [B, N, I]
  // A token's change of channels, W_down diag(g) W_up, is linear in its gates: one product gives those of all tokens,
  // and nothing as wide as [I, D] a token ever exists.
  const at::Tensor outer = (tape.down.t().unsqueeze(2) * tape.up.unsqueeze(1)).reshape({inner, channels * channels});
  const at::Tensor change =
      at::matmul(gate, outer).view({gate.size(0), gate.size(1), channels, channels});  // [B, N, K, K]
  return kernels::update_position(position, attended.to(position.scalar_type()), mixing(tape.mix, mix), change);
}

class TapeEncoding final : public PositionSeam {
 public:
  explicit TapeEncoding(Mix mix) : mix_(mix) {}

  // The last layer's update would feed nothing: its tensors exist, on disk too, but get no gradient.
  bool updates() const override { return layers_.size() > 1; }
  bool updates(std::int64_t layer) const override { return static_cast<std::size_t>(layer) + 1 < layers_.size(); }

  at::Tensor update(std::int64_t layer, const at::Tensor& position, const at::Tensor& attended,
                    const at::Tensor& mlp_output) const override {
    const auto i = static_cast<std::size_t>(layer);
    if (sine_layers_.empty()) return updated(layers_[i], mix_, position, attended, mlp_output);
    const std::int64_t half = position.size(3) / 2;
    const auto part = [&](const TapeLayer& tape, std::int64_t begin) {
      return updated(tape, mix_, position.narrow(3, begin, half), attended.narrow(3, begin, half), mlp_output);
    };
    return at::cat({part(layers_[i], 0), part(sine_layers_[i], half)}, 3);
  }

  std::vector<at::Tensor> trained(std::int64_t layer) const override {
    const auto i = static_cast<std::size_t>(layer);
    if (!updates(layer)) return {};
    std::vector<at::Tensor> all;
    for (const std::vector<TapeLayer>* layers : {&layers_, &sine_layers_}) {
      if (layers->empty()) continue;
      const TapeLayer& tape = (*layers)[i];
      for (const at::Tensor& t : {tape.mix, tape.up, tape.gate, tape.down}) all.push_back(t);
    }
    return all;
  }

  std::vector<TapeLayer> layers_;
  std::vector<TapeLayer> sine_layers_;  // the ablation's; else empty

 private:
  Mix mix_;
};

// Angles as precise as the model, so that equivariance holds to the last digit. With random_offset, training draws
// where each sequence's positions begin, which by equivariance changes only the numbers it is computed with.
class TapeStart final : public RotarySeam {
 public:
  explicit TapeStart(bool random_offset) : random_offset_(random_offset) {}

  at::Tensor start(const ModelConfig& config, const at::Tensor& positions, std::int64_t planned_length,
                   at::ScalarType dtype, const Training* training) const override {
    at::Tensor from = positions;  // [B|1, N]
    if (random_offset_ && training != nullptr) {
      std::vector<std::int64_t> offsets;
      for (std::int64_t row = 0; row < training->rows; ++row) {
        const auto range = static_cast<std::uint64_t>(2 * config.longest_context());
        offsets.push_back(static_cast<std::int64_t>(draw(training->row_seed(row), 0) % range));
      }
      from = positions + at::tensor(offsets, at::kLong).to(positions.device()).unsqueeze(1);  // [B, N]
    }
    return cos_sin(rotary_frequencies(config.rope, config.head_dim, config.context, planned_length), from, dtype);
  }

 private:
  bool random_offset_;
};

}  // namespace

void tape_defaults(MethodOptions& options) { options.rank = 0; }

void check_tape(const MethodOptions& options) {
  const MethodOptions plain;
  if (options.rank > 0 ||
      (options.alpha == plain.alpha && options.dropout == plain.dropout && options.targets == plain.targets &&
       options.layers.empty() && options.excluded.empty() && !options.rslora && !options.dora)) {
    return;
  }
  fail("method", "tape has no LoRA matrices unless it is given a rank; add rank=8, or drop the settings of LoRA.");
}

void make_tape(ModelBuilder& model) {
  const ModelConfig& config = model.config;
  const std::int64_t channels = config.kv_heads, heads = config.heads, inner = model.options.width * heads;
  const auto seam = std::make_shared<TapeEncoding>(model.options.mix);
  // Zero where the updates would begin: at the start the adapted model is the base model.
  const auto make_layer = [&](std::int64_t layer, const std::string& suffix) {
    const std::string name = fmt::format("model.layers.{}.", layer);
    const auto normal = [&](std::int64_t out, std::int64_t in) {
      return at::empty({out, in}, at::kFloat).normal_(0, 0.02, model.generator);
    };
    TapeLayer tape;
    tape.up = model.train(name + "pe.up_proj" + suffix + ".weight", at::zeros({inner, channels}));
    tape.gate = model.train(name + "pe.x_proj" + suffix + ".weight", normal(inner, config.hidden_size));
    tape.down = model.train(name + "pe.down_proj" + suffix + ".weight", normal(channels, inner));
    tape.mix = model.train(name + "post_attention_linear" + suffix + ".weight", at::zeros({channels, heads}));
    return tape;
  };
  for (std::int64_t i = 0; i < config.layers; ++i) {
    seam->layers_.push_back(make_layer(i, ""));
    if (!model.options.equivariant) seam->sine_layers_.push_back(make_layer(i, "_sine"));
  }
  model.seams.position = seam;
  model.seams.rotary = std::make_shared<TapeStart>(model.options.random_offset);
  if (model.options.rank > 0) make_lora(model);
}

}  // namespace tapetune
