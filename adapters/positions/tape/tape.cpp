#include "adapters/positions/tape/tape.h"

#include "adapters/positions/tape/checkpoint.h"
#include "adapters/positions/tape/tape_files.h"
#include "core/error.h"
#include "kernels/position.h"
#include "model/rotary.h"

namespace tapetune {

namespace {

enum class Mix { full, per_head };

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

class TapeEncoding final : public PositionEncoding {
 public:
  TapeEncoding(Mix mix, bool random_offset) : mix_(mix), random_offset_(random_offset) {}

  // Angles as precise as the model, so that equivariance holds to the last digit. With random_offset, training draws
  // where each sequence's positions begin, which by equivariance changes only the numbers it is computed with.
  PositionState start(const PositionInput& in) const override {
    at::Tensor from = in.positions;  // [B|1, N]
    if (random_offset_ && in.training != nullptr) {
      std::vector<std::int64_t> offsets;
      for (std::int64_t row = 0; row < in.training->rows; ++row) {
        const auto range = static_cast<std::uint64_t>(2 * in.config.longest_context());
        offsets.push_back(static_cast<std::int64_t>(draw(in.training->row_seed(row), 0) % range));
      }
      from = in.positions + at::tensor(offsets, at::kLong).to(in.positions.device()).unsqueeze(1);  // [B, N]
    }
    const Frequencies frequencies =
        rotary_frequencies(in.config.rope, in.config.head_dim, in.config.context, in.planned_length, in.dtype);
    return {cos_sin(frequencies, from, in.dtype), {}};
  }

  bool draws() const override { return random_offset_; }

  // The last layer's update would feed nothing: its tensors exist, on disk too, but get no gradient.
  Update update_kind(std::int64_t layer) const override {
    const bool feeds = static_cast<std::size_t>(layer) + 1 < layers_.size();
    return {feeds, feeds};
  }

  bool uses_tensors(std::int64_t layer) const override { return update_kind(layer).changes; }

  PositionState update(std::int64_t layer, const PositionState& state, const at::Tensor& attended,
                       const at::Tensor& mlp_output) const override {
    const auto i = static_cast<std::size_t>(layer);
    const at::Tensor& position = state.query;
    if (sine_layers_.empty()) return {updated(layers_[i], mix_, position, attended, mlp_output), {}};
    const std::int64_t half = position.size(3) / 2;
    const auto part = [&](const TapeLayer& tape, std::int64_t begin) {
      return updated(tape, mix_, position.narrow(3, begin, half), attended.narrow(3, begin, half), mlp_output);
    };
    return {at::cat({part(layers_[i], 0), part(sine_layers_[i], half)}, 3), {}};
  }

  // What a layer's backward needs of the update: the input and the values of the gates, and the change of channels.
  double saved_numbers(std::int64_t layer) const override {
    if (!update_kind(layer).changes) return 0;
    const TapeLayer& tape = layers_[static_cast<std::size_t>(layer)];
    const auto number = [](std::int64_t n) { return static_cast<double>(n); };
    const double inner = number(tape.gate.size(0)), hidden = number(tape.gate.size(1)),
                 channels = number(tape.up.size(1));
    return hidden + 2 * inner + channels * channels;
  }

  std::vector<TapeLayer> layers_;
  std::vector<TapeLayer> sine_layers_;  // the ablation's; else empty

 private:
  Mix mix_;
  bool random_offset_;
};

std::shared_ptr<const PositionEncoding> make_tape(const Settings& settings, ModelBuilder& model) {
  const ModelConfig& config = model.config;
  const std::int64_t channels = config.kv_heads, heads = config.heads, inner = settings.whole("width") * heads;
  const Mix mix = settings.word("mix") == "full" ? Mix::full : Mix::per_head;
  const auto encoding = std::make_shared<TapeEncoding>(mix, settings.flag("random_offset"));
  // Zero where the updates would begin: at the start the adapted model is the base model.
  const auto make_layer = [&](std::int64_t layer, const std::string& suffix) {
    const std::string name = fmt::format("model.layers.{}.", layer);
    const auto normal = [&](std::int64_t out, std::int64_t in) {
      return at::empty({out, in}, at::kFloat).normal_(0, 0.02, model.generator);
    };
    const auto train = [&](const char* module, const at::Tensor& start, std::string_view group) {
      return model.train(name + module + suffix + ".weight", start, Owner::positions, group);
    };
    TapeLayer tape;
    tape.up = train("pe.up_proj", at::zeros({inner, channels}), "position");
    tape.gate = train("pe.x_proj", normal(inner, config.hidden_size), "position");
    tape.down = train("pe.down_proj", normal(channels, inner), "position");
    tape.mix = train("post_attention_linear", at::zeros({channels, heads}), "attention mixing");
    return tape;
  };
  for (std::int64_t i = 0; i < config.layers; ++i) {
    encoding->layers_.push_back(make_layer(i, ""));
    if (!settings.flag("equivariant")) encoding->sine_layers_.push_back(make_layer(i, "_sine"));
  }
  return encoding;
}

std::vector<Key> tape_keys() {
  std::vector<Key> keys(4);
  keys[0] = {"mix",
             "how heads mix in the attention's position update: full or per-head",
             Key::Type::word,
             "full",
             0,
             0,
             "",
             {"full", "per-head"}};
  keys[1] = {"width", "inner width of the position update, in heads", Key::Type::whole, 4, 1, 1024, "an integer >= 1"};
  keys[2] = {"random_offset", "random position offset for every training sequence", Key::Type::flag, false};
  keys[3] = {"equivariant", "false breaks the equivariance, as an ablation", Key::Type::flag, true};
  return keys;
}

}  // namespace

PositionComponent tape_component() {
  PositionComponent component;
  component.name = "tape";
  component.summary = "a state that each layer updates from the text (TAPE)";
  component.title = "TAPE";
  component.keys = tape_keys();
  component.make = make_tape;
  component.rotates = true;
  component.ablation = "equivariant=false";
  component.ablated = "TAPE without equivariance";
  component.owns = is_tape_tensor;
  component.recognise = stored_tape_settings;
  component.export_files = export_tape;
  for (const TapeFile& file : tape_files()) component.exported.push_back(file.name);
  component.card =
      "A Llama with TAPE's contextual positions, merged by tapetune. `modeling_tape.py` beside the weights "
      "lets transformers run it.";
  return component;
}

}  // namespace tapetune
