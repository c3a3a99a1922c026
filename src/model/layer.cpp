#include "model/layer.h"

#include "core/trace.h"
#include "kernels/pointwise.h"
#include "model/recompute.h"

namespace tapetune {

namespace {

// x + y; in x's own memory where nobody else can want the old value.
at::Tensor add_residual(at::Tensor x, const at::Tensor& y, bool keep) {
  return keep || !kernels::fused(x) || !kernels::fused(y) ? x + y : x.add_(y);
}

at::Tensor rotated(const at::Tensor& x, const at::Tensor& state) {
  return state.defined() ? kernels::rotate(x, state) : x;
}

// Each head by itself.
at::Tensor normed_heads(const at::Tensor& x, const at::Tensor& weight, double eps) {
  return weight.defined() ? kernels::rms_norm(x, weight, eps) : x;
}

}  // namespace

LayerState decoder_layer(const Llama& model, std::int64_t i, const LayerState& in, const Pass& pass) {
  const trace::Span span(pass.gradients_only ? "layer again" : "layer", i);
  const ModelConfig& config = model.config();
  const LayerSpec spec = config.layer(i);
  const Parallel& parallel = model.parallel();
  const LayerWeights w =
      parallel.layer ? parallel.layer(i, pass.gradients_only) : model.weights().layers[static_cast<std::size_t>(i)];
  const PositionEncoding& positions = *model.components().positions;
  const PositionEncoding::Update kind = positions.update_kind(i);
  const auto project = [&](std::initializer_list<Projection> which, std::initializer_list<Linear> frozen,
                           const at::Tensor& x, bool gradients_only = false) {
    return model.components().adapter->project(
        {i, std::span(which.begin(), which.size()), std::span(frozen.begin(), frozen.size()), pass.training,
         gradients_only},
        x);
  };
  const auto heads = [&](const at::Tensor& t) {
    return t.view({pass.batch, pass.length, -1, config.head_dim});  // [B, N, H|K, D]
  };
  const at::Tensor normed = kernels::rms_norm(in.x, w.input_norm, config.rms_norm_eps);
  AttentionOutput attended;
  {
    const auto qkv = project({Projection::q, Projection::k, Projection::v}, {w.q, w.k, w.v}, normed);
    AttentionInput attention;
    attention.layer = i;
    attention.q = normed_heads(heads(qkv[0]), w.q_norm, config.rms_norm_eps);
    attention.k = normed_heads(heads(qkv[1]), w.k_norm, config.rms_norm_eps);
    if (spec.rotates) {
      attention.q = rotated(attention.q, in.position.query);
      attention.k = rotated(attention.k, in.position.key.defined() ? in.position.key : in.position.query);
    }
    attention.v = heads(qkv[2]);
    // A state that changes goes on through layers that do not rotate: they attend to it by content alone.
    if (kind.attends) attention.extra_values = in.position.query.expand({pass.batch, -1, config.kv_heads, -1});
    attention.scores.scale = 1.0 / std::sqrt(static_cast<double>(config.head_dim));
    attention.scores.visible = pass.visible.within(spec.window);
    const at::ScalarType score_dtype = model.dtype() == at::kDouble ? at::kDouble : at::kFloat;
    attention.scores.bias = positions.score_bias({config, i, pass.longest, in.x.options().dtype(score_dtype)});
    attention.spans = pass.spans;
    attention.caches = pass.caches;
    attention.saved = pass.saved;
    attention.exchange = parallel.exchange;
    if (pass.watch != nullptr) (*pass.watch)(attention);
    attended = causal_attention(attention);
  }
  const at::Tensor merged = attended.values.reshape({pass.batch, pass.length, -1});  // [B, N, H D]
  const at::Tensor x = add_residual(in.x, project({Projection::o}, {w.o}, merged)[0], pass.keep_input);

  const at::Tensor middle = kernels::rms_norm(x, w.post_attention_norm, config.rms_norm_eps);
  at::Tensor gated;  // [B, N, I]
  {
    const auto both = project({Projection::gate, Projection::up}, {w.gate, w.up}, middle);
    gated = kernels::silu_mul(both[0], both[1]);
  }
  const at::Tensor y = project({Projection::down}, {w.down}, gated, pass.gradients_only && !kind.changes)[0];
  LayerState out;
  out.position = kind.changes ? positions.update(i, in.position, attended.extra_output, y) : in.position;
  out.x = add_residual(x, y, false);
  return out;
}

LayerState checkpointed_layer(const Llama& model, std::int64_t i, const LayerState& in, const Pass& pass) {
  const bool changes = model.components().positions->update_kind(i).changes;
  const auto saved = std::make_shared<SavedAttention>();
  // The backward uses the model, which must therefore live (and stay where it is) until then.
  const Recompute run = [&model, i, pass, training = *pass.training, saved, changes](
                            const std::vector<at::Tensor>& inputs, bool again) -> std::vector<at::Tensor> {
    Pass own = pass;
    own.training = &training;
    own.keep_input = true;
    own.gradients_only = again;
    if (training.checkpointing == Checkpointing::selective) own.saved = saved.get();
    const LayerState out = decoder_layer(model, i, {inputs[0], {inputs[1], inputs[2]}}, own);
    if (!changes) return {out.x};
    std::vector<at::Tensor> all{out.x, out.position.query};
    if (out.position.key.defined()) all.push_back(out.position.key);
    return all;
  };
  const std::vector<at::Tensor> out = recomputed({in.x, in.position.query, in.position.key}, model.trained_in(i), run);
  if (!changes) return {out[0], in.position};
  return {out[0], {out[1], out.size() > 2 ? out[2] : at::Tensor()}};
}

}  // namespace tapetune
