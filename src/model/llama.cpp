#include "model/llama.h"

#include "core/error.h"
#include "core/signals.h"
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

at::Tensor implied_positions(const ForwardInput& in) {
  const std::int64_t batch = in.tokens.size(0), length = in.tokens.size(1);
  const at::Tensor count = at::arange(length, in.tokens.options());
  if (in.spans.empty() && in.caches.empty()) return count.unsqueeze(0);
  std::vector<std::int64_t> starts;
  for (std::int64_t b = 0; b < batch; ++b) {
    const auto row = static_cast<std::size_t>(b);
    starts.push_back((in.caches.empty() ? 0 : in.caches[row]->length()) - (in.spans.empty() ? 0 : in.spans[row].begin));
  }
  const at::Tensor start = at::tensor(starts, at::kLong).to(in.tokens.device()).unsqueeze(1);
  return (count.unsqueeze(0) + start).clamp_min(0);  // [B, N]
}

// x + y; in x's own memory where nobody else can want the old value.
at::Tensor add_residual(at::Tensor x, const at::Tensor& y, bool keep) {
  return keep || !kernels::fused(x) || !kernels::fused(y) ? x + y : x.add_(y);
}

}  // namespace

Llama::Llama(ModelConfig config, LlamaWeights weights, at::ScalarType dtype, std::shared_ptr<const Seams> seams)
    : config_(std::move(config)),
      weights_(std::move(weights)),
      dtype_(dtype),
      seams_(seams ? std::move(seams) : std::make_shared<const Seams>()) {}

Llama Llama::open(const Checkpoint& checkpoint, at::ScalarType dtype, at::Device device) {
  return {checkpoint.config(), map_weights(checkpoint, device), dtype};
}

SequenceCache Llama::make_cache(std::int64_t capacity) const {
  return {config_, capacity, weights_.embedding.options().dtype(dtype_)};
}

ForwardOutput Llama::forward(const ForwardInput& given) const {
  check_tokens(given.tokens, config_.vocab_size);
  ForwardInput in = given;
  in.tokens = in.tokens.to(weights_.embedding.device());
  const std::int64_t batch = in.tokens.size(0), length = in.tokens.size(1);
  check_rows(in, batch, length);
  const at::Tensor positions = in.positions.defined() ? in.positions.to(in.tokens.device()) : implied_positions(in);
  const std::int64_t planned = in.planned_length > 0 ? in.planned_length : positions.max().item<std::int64_t>() + 1;

  ForwardOutput out;
  at::Tensor x = at::embedding(weights_.embedding, in.tokens).to(dtype_);  // [B, N, hidden]
  PositionState position = rotary_state(seams_->rotary(config_, planned), positions);
  for (std::int64_t i = 0; i < config_.layers; ++i) {
    const LayerWeights& w = weights_.layers[static_cast<std::size_t>(i)];
    if (in.all_hidden) out.hidden.push_back(x);
    if (length > 1) check_interrupted();  // a long input may take a while; a single token never does

    const at::Tensor normed = kernels::rms_norm(x, w.input_norm, config_.rms_norm_eps);
    const auto heads = [&](Projection which, const Linear& frozen) {
      return seams_->linear(i, which, frozen, normed).view({batch, length, -1, config_.head_dim});  // [B, N, H|K, D]
    };
    AttentionInput attention;
    attention.layer = i;
    attention.q = kernels::rotate(heads(Projection::q, w.q), position.cos, position.sin).transpose(1, 2);
    attention.k = kernels::rotate(heads(Projection::k, w.k), position.cos, position.sin).transpose(1, 2);
    attention.v = heads(Projection::v, w.v).transpose(1, 2);
    attention.scale = 1.0 / std::sqrt(static_cast<double>(config_.head_dim));
    attention.spans = in.spans;
    attention.caches = in.caches;
    const Seams::Attended attended = seams_->attention(attention, position);
    const at::Tensor merged = attended.values.transpose(1, 2).reshape({batch, length, -1});  // [B, N, H D]
    x = add_residual(x, seams_->linear(i, Projection::o, w.o, merged), in.all_hidden);
    position = seams_->after_attention(i, std::move(position), attended.attended);

    const at::Tensor middle = kernels::rms_norm(x, w.post_attention_norm, config_.rms_norm_eps);
    const at::Tensor gated = kernels::silu_mul(seams_->linear(i, Projection::gate, w.gate, middle),
                                               seams_->linear(i, Projection::up, w.up, middle));  // [B, N, I]
    const at::Tensor y = seams_->linear(i, Projection::down, w.down, gated);
    position = seams_->after_mlp(i, std::move(position), y);
    x = add_residual(x, y, in.all_hidden);
  }
  for (std::size_t b = 0; b < in.caches.size(); ++b) {
    in.caches[b]->advance(in.spans.empty() ? length : in.spans[b].end - in.spans[b].begin);
  }
  out.last = kernels::rms_norm(x, weights_.norm, config_.rms_norm_eps);
  if (in.all_hidden) out.hidden.push_back(out.last);
  return out;
}

at::Tensor Llama::logits(const at::Tensor& hidden) const { return apply(weights_.head, hidden); }

at::ScalarType default_dtype(const Checkpoint& checkpoint, at::Device device) {
  const at::ScalarType stored = checkpoint.dtype();
  if (stored == at::kDouble || !device.is_cpu()) return stored;
  return stored == at::kBFloat16 && cpu_has_fast_bf16() ? stored : at::kFloat;
}

}  // namespace tapetune
