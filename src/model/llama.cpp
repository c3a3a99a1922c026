#include "model/llama.h"

#include "core/error.h"
#include "core/signals.h"
#include "core/trace.h"
#include "kernels/pointwise.h"

namespace tapetune {

namespace {

void check_tokens(const at::Tensor& tokens, std::int64_t vocab) {
  if (tokens.dim() != 2 || tokens.numel() == 0) fail("model", "tokens must be [batch, length] and not empty.");
  const at::Tensor outside = at::logical_or(tokens < 0, tokens >= vocab);
  if (outside.any().item<bool>()) {
    fail("model", "token id {} is out of range: the vocabulary has {} tokens (0 to {}).",
         tokens.masked_select(outside)[0].item<std::int64_t>(), vocab, vocab - 1);
  }
}

void check_rows(const ForwardInput& in, std::int64_t batch, std::int64_t length) {
  const auto fits = [&](std::size_t count) { return count == 0 || count == static_cast<std::size_t>(batch); };
  if (!fits(in.spans.size()) || !fits(in.caches.size())) {
    fail("model", "{} rows need as many spans and caches or none, but there are {} and {}.", batch, in.spans.size(),
         in.caches.size());
  }
  for (const RowSpan& span : in.spans) {
    if (span.begin < 0 || span.begin >= span.end || span.end > length) {
      fail("model", "a row's tokens [{}, {}) must lie within its {} places and not be empty.", span.begin, span.end,
           length);
    }
  }
}

at::Tensor implied_positions(const ForwardInput& in, std::int64_t sequence_rank) {
  const std::int64_t batch = in.tokens.size(0), length = in.tokens.size(1);
  const at::Tensor count = at::arange(sequence_rank * length, (sequence_rank + 1) * length, in.tokens.options());
  if (in.spans.empty() && in.caches.empty()) return count.unsqueeze(0);
  std::vector<std::int64_t> starts;
  for (std::int64_t b = 0; b < batch; ++b) {
    const auto row = static_cast<std::size_t>(b);
    starts.push_back((in.caches.empty() ? 0 : in.caches[row]->length()) - (in.spans.empty() ? 0 : in.spans[row].begin));
  }
  const at::Tensor start = at::tensor(starts, at::kLong).to(in.tokens.device()).unsqueeze(1);
  return (count.unsqueeze(0) + start).clamp_min(0);  // [B, N]
}

// Those of the heads that a rank has: the first half of all heads takes `first`, the second `second`.
kernels::Cuts cuts_of_rank(kernels::Cuts cuts, std::int64_t sequence_rank, std::int64_t sequence_size) {
  if (2 * (sequence_rank + 1) <= sequence_size) cuts.second = cuts.first;
  if (2 * sequence_rank >= sequence_size) cuts.first = cuts.second;
  return cuts;
}

// x + y; in x's own memory where nobody else can want the old value.
at::Tensor add_residual(at::Tensor x, const at::Tensor& y, bool keep) {
  return keep || !kernels::fused(x) || !kernels::fused(y) ? x + y : x.add_(y);
}

}  // namespace

// What all layers of one forward share.
struct Llama::Pass {
  std::int64_t batch, length;
  std::span<const RowSpan> spans;
  std::span<SequenceCache* const> caches;
  kernels::Cuts cuts;
  const Training* training = nullptr;
  bool keep_input = false;          // somebody holds on to a layer's input
  SavedAttention* saved = nullptr;  // of this layer
  bool gradients_only = false;      // a layer is recomputed for its gradients; its output is known
};

namespace {

// A layer whose activations are not kept: the forward runs without a graph, the backward runs the layer again with one.
struct Recomputed : torch::autograd::Function<Recomputed> {
  using Run = std::function<std::vector<at::Tensor>(const at::Tensor& x, const at::Tensor& position, bool again)>;
  struct Holder : torch::CustomClassHolder {
    explicit Holder(Run given) : run(std::move(given)) {}
    Run run;
  };

  // trained: every parameter that the layer uses; their gradients come out of this node like any other's.
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                                                const at::Tensor& position, at::TensorList trained, const Run* run) {
    torch::autograd::variable_list saved{x, position};
    saved.insert(saved.end(), trained.begin(), trained.end());
    ctx->save_for_backward(saved);
    ctx->saved_data["run"] = c10::IValue::make_capsule(c10::make_intrusive<Holder>(*run));
    ctx->set_materialize_grads(false);
    return (*run)(x, position, false);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    const torch::autograd::variable_list saved = ctx->get_saved_variables();
    const auto holder = c10::static_intrusive_pointer_cast<Holder>(ctx->saved_data["run"].toCapsule());
    torch::autograd::variable_list out(saved.size() + 1), wanted, given;
    std::vector<std::size_t> places;
    const auto input = [&](std::size_t i) {
      at::Tensor leaf = saved[i].detach();
      if (ctx->needs_input_grad(i)) leaf.requires_grad_(true);
      return leaf;
    };
    const c10::AutoGradMode with_graph(true);
    const at::Tensor x = input(0), position = input(1);
    for (std::size_t i = 0; i < saved.size(); ++i) {
      if (!ctx->needs_input_grad(i)) continue;
      wanted.push_back(i == 0 ? x : i == 1 ? position : saved[i]);
      places.push_back(i);
    }
    torch::autograd::variable_list outputs;
    const std::vector<at::Tensor> again = holder->run(x, position, true);
    for (std::size_t i = 0; i < again.size(); ++i) {
      if (!grads[i].defined() || !again[i].requires_grad()) continue;
      outputs.push_back(again[i]);
      given.push_back(grads[i]);
    }
    if (outputs.empty()) return out;
    const torch::autograd::variable_list found =
        torch::autograd::grad(outputs, wanted, given, /*retain_graph=*/false, /*create_graph=*/false,
                              /*allow_unused=*/true);
    for (std::size_t i = 0; i < places.size(); ++i) out[places[i]] = found[i];
    return out;
  }
};

}  // namespace

Llama::Llama(ModelConfig config, LlamaWeights weights, at::ScalarType dtype, Seams seams)
    : config_(std::move(config)), weights_(std::move(weights)), dtype_(dtype), seams_(std::move(seams)) {
  disable_broken_amx();
}

Llama Llama::open(const Checkpoint& checkpoint, at::ScalarType dtype, at::Device device) {
  return {checkpoint.config(), map_weights(checkpoint, device), dtype};
}

void Llama::share(LlamaWeights weights, Parallel parallel) {
  weights_ = std::move(weights);
  parallel_ = std::move(parallel);
}

SequenceCache Llama::make_cache(std::int64_t capacity) const {
  return {config_, capacity, weights_.norm.options().dtype(dtype_).requires_grad(false), seams_.position->updates()};
}

std::vector<at::Tensor> Llama::trained_in(std::int64_t index) const {
  std::vector<at::Tensor> all = seams_.linear->trained(index);
  const std::vector<at::Tensor> position = seams_.position->trained(index);
  all.insert(all.end(), position.begin(), position.end());
  LayerWeights w = weights_.layers[static_cast<std::size_t>(index)];  // handles
  for_each_tensor(config_, index, w, [&](const TensorSpec&, at::Tensor& tensor) { all.push_back(tensor); });
  std::erase_if(all, [](const at::Tensor& t) { return !t.defined() || !t.requires_grad(); });
  return all;
}

AttentionOutput Llama::spread_attention(AttentionInput in) const {
  const std::vector<at::Tensor> mine = parallel_.to_heads({in.q, in.k, in.v, in.extra_values});  // [B, N, H|K / S, D]
  in.q = mine[0];
  in.k = mine[1];
  in.v = mine[2];
  in.extra_values = mine[3];
  in.apart = true;
  AttentionOutput out = causal_attention(in);
  out.values = parallel_.to_tokens(out.values, out.lse);
  if (out.extra_output.defined()) out.extra_output = parallel_.to_tokens(out.extra_output, out.lse);
  return out;
}

Llama::State Llama::layer(std::int64_t i, const State& in, const Pass& pass) const {
  const trace::Span span(pass.gradients_only ? "layer again" : "layer", i);
  const LayerWeights w =
      parallel_.layer ? parallel_.layer(i, pass.gradients_only) : weights_.layers[static_cast<std::size_t>(i)];
  const bool updates = seams_.position->updates(i);
  const auto project = [&](std::initializer_list<Projection> which, std::initializer_list<Linear> frozen,
                           const at::Tensor& x, bool gradients_only = false) {
    return seams_.linear->project({i, std::span(which.begin(), which.size()), std::span(frozen.begin(), frozen.size()),
                                   pass.training, gradients_only},
                                  x);
  };
  const auto heads = [&](const at::Tensor& t) {
    return t.view({pass.batch, pass.length, -1, config_.head_dim});  // [B, N, H|K, D]
  };
  const at::Tensor normed = kernels::rms_norm(in.x, w.input_norm, config_.rms_norm_eps);
  AttentionOutput attended;
  {
    const auto qkv = project({Projection::q, Projection::k, Projection::v}, {w.q, w.k, w.v}, normed);
    AttentionInput attention;
    attention.layer = i;
    attention.q = kernels::rotate(heads(qkv[0]), in.position);
    attention.k = kernels::rotate(heads(qkv[1]), in.position);
    attention.v = heads(qkv[2]);
    if (updates) {
      attention.extra_values = in.position.expand({pass.batch, -1, config_.kv_heads, -1});
    }
    attention.scale = 1.0 / std::sqrt(static_cast<double>(config_.head_dim));
    attention.spans = pass.spans;
    attention.caches = pass.caches;
    attention.cuts = pass.cuts;
    attention.saved = pass.saved;
    attended = parallel_.sequence_size > 1 ? spread_attention(attention) : causal_attention(attention);
  }
  const at::Tensor merged = attended.values.reshape({pass.batch, pass.length, -1});  // [B, N, H D]
  const at::Tensor x = add_residual(in.x, project({Projection::o}, {w.o}, merged)[0], pass.keep_input);

  const at::Tensor middle = kernels::rms_norm(x, w.post_attention_norm, config_.rms_norm_eps);
  at::Tensor gated;  // [B, N, I]
  {
    const auto both = project({Projection::gate, Projection::up}, {w.gate, w.up}, middle);
    gated = kernels::silu_mul(both[0], both[1]);
  }
  const at::Tensor y = project({Projection::down}, {w.down}, gated, pass.gradients_only && !updates)[0];
  State out;
  out.position = updates ? seams_.position->update(i, in.position, attended.extra_output, y) : in.position;
  out.x = add_residual(x, y, false);
  return out;
}

Llama::State Llama::checkpointed_layer(std::int64_t i, const State& in, const Pass& pass) const {
  const bool updates = seams_.position->updates(i);
  const auto saved = std::make_shared<SavedAttention>();
  // The backward uses the model, which must therefore live (and stay where it is) until then.
  const Recomputed::Run run = [this, i, pass, training = *pass.training, saved, updates](
                                  const at::Tensor& x, const at::Tensor& position,
                                  bool again) -> std::vector<at::Tensor> {
    Pass own = pass;
    own.training = &training;
    own.keep_input = true;
    own.gradients_only = again;
    if (training.checkpointing == Checkpointing::selective) own.saved = saved.get();
    const State out = layer(i, {x, position}, own);
    return updates ? std::vector<at::Tensor>{out.x, out.position} : std::vector<at::Tensor>{out.x};
  };
  const std::vector<at::Tensor> trained = trained_in(i);
  const std::vector<at::Tensor> out = Recomputed::apply(in.x, in.position, at::TensorList(trained), &run);
  return {out[0], updates ? out[1] : in.position};
}

ForwardOutput Llama::forward(const ForwardInput& given) const {
  check_tokens(given.tokens, config_.vocab_size);
  ForwardInput in = given;
  in.tokens = in.tokens.to(weights_.norm.device());
  const std::int64_t batch = in.tokens.size(0), length = in.tokens.size(1);
  check_rows(in, batch, length);
  if (in.training && (!in.spans.empty() || !in.caches.empty())) {
    fail("model", "training takes whole sequences; padding and caches are for evaluation.");
  }
  const std::int64_t sequence_rank = parallel_.sequence_rank, sequence_size = parallel_.sequence_size;
  if (sequence_size > 1 && (!in.spans.empty() || !in.caches.empty() || in.positions.defined())) {
    fail("model", "sequence parallel takes neither padding, nor a cache, nor explicit positions.");
  }
  const at::Tensor positions =
      in.positions.defined() ? in.positions.to(in.tokens.device()) : implied_positions(in, sequence_rank);
  const std::int64_t planned = in.planned_length > 0 ? in.planned_length
                               : sequence_size > 1   ? length * sequence_size
                                                     : positions.max().item<std::int64_t>() + 1;

  Pass pass{batch, length, in.spans, in.caches, {}, nullptr, in.all_hidden, nullptr, false};
  if (in.training) {
    in.training->rows = batch;
    in.training->sequence_rank = sequence_rank;
    in.training->sequence_size = sequence_size;
    pass.training = &*in.training;
  }
  pass.cuts = cuts_of_rank(seams_.attention->cuts(config_, length * sequence_size, pass.training), sequence_rank,
                           sequence_size);
  const bool recompute = c10::GradMode::is_enabled() && in.training && in.training->checkpointing != Checkpointing::off;

  ForwardOutput out;
  State state;
  state.x = at::embedding(parallel_.embedding ? parallel_.embedding() : weights_.embedding, in.tokens).to(dtype_);
  state.position = seams_.rotary->start(config_, positions, planned, dtype_, pass.training);
  for (std::int64_t i = 0; i < config_.layers; ++i) {
    if (in.all_hidden) out.hidden.push_back(state.x);
    if (in.all_positions) out.positions.push_back(state.position);
    if (length > 1) check_interrupted();  // a long input may take a while; a single token never does
    state = recompute ? checkpointed_layer(i, state, pass) : layer(i, state, pass);
  }
  for (std::size_t b = 0; b < in.caches.size(); ++b) {
    in.caches[b]->advance(in.spans.empty() ? length : in.spans[b].end - in.spans[b].begin);
  }
  out.last = kernels::rms_norm(state.x, weights_.norm, config_.rms_norm_eps);
  if (in.all_hidden) out.hidden.push_back(out.last);
  return out;
}

at::Tensor Llama::logits(const at::Tensor& hidden, const Training* training) const {
  const Projection which = Projection::head;
  const Linear frozen = head();
  std::optional<Training> own;
  if (training != nullptr) {
    own = *training;
    own->sequence_rank = parallel_.sequence_rank;
    own->sequence_size = parallel_.sequence_size;
  }
  return seams_.linear->project({config_.layers, {&which, 1}, {&frozen, 1}, own ? &*own : nullptr, false}, hidden)[0];
}

at::ScalarType default_dtype(const Checkpoint& checkpoint, at::Device device) {
  const at::ScalarType stored = checkpoint.dtype();
  if (stored == at::kDouble || !device.is_cpu()) return stored;
  return stored == at::kBFloat16 && cpu_has_fast_bf16() ? stored : at::kFloat;
}

}  // namespace tapetune
