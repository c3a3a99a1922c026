#include "model/llama.h"

#include <charconv>

#include "core/error.h"
#include "core/signals.h"
#include "kernels/pointwise.h"
#include "model/layer.h"

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

// The layer that a tensor's name says, `layers` for the head; none: it is of no single layer.
std::optional<std::int64_t> layer_of(std::string_view name, std::int64_t layers) {
  constexpr std::string_view prefix = "model.layers.";
  if (name.starts_with("lm_head.")) return layers;
  if (!name.starts_with(prefix)) return std::nullopt;
  std::int64_t layer = 0;
  const auto read = std::from_chars(name.data() + prefix.size(), name.data() + name.size(), layer);
  return read.ec == std::errc() && layer < layers ? std::optional(layer) : std::nullopt;
}

}  // namespace

Llama::Llama(ModelConfig config, LlamaWeights weights, at::ScalarType dtype, Components components)
    : config_(std::move(config)),
      weights_(std::move(weights)),
      dtype_(dtype),
      components_(std::move(components)),
      added_(static_cast<std::size_t>(config_.layers) + 1) {
  disable_broken_amx();
  for (const Parameter& p : components_.parameters) {
    if (p.owner == Owner::base) continue;
    const std::optional<std::int64_t> layer = layer_of(p.name, config_.layers);
    for (std::int64_t i = layer.value_or(0); i <= layer.value_or(config_.layers - 1); ++i) {
      // A layer that leaves the positions as they are uses none of their tensors: TAPE's last layer has such.
      const bool used = p.owner == Owner::adapter || components_.positions->uses_tensors(i);
      if (used) added_[static_cast<std::size_t>(i)].push_back(p.value);
    }
  }
}

Llama Llama::open(const Checkpoint& checkpoint, at::ScalarType dtype, at::Device device) {
  return {checkpoint.config(), map_weights(checkpoint, device), dtype};
}

void Llama::share(LlamaWeights weights, Parallel parallel) {
  weights_ = std::move(weights);
  parallel_ = std::move(parallel);
}

SequenceCache Llama::make_cache(std::int64_t capacity) const {
  return {config_, capacity, weights_.norm.options().dtype(dtype_).requires_grad(false),
          components_.positions->attends(config_.layers)};
}

const std::vector<at::Tensor>& Llama::added_in(std::int64_t index) const {
  return added_[static_cast<std::size_t>(index)];
}

std::vector<at::Tensor> Llama::trained_in(std::int64_t index) const {
  std::vector<at::Tensor> all = added_in(index);
  LayerWeights w = weights_.layers[static_cast<std::size_t>(index)];  // handles
  for_each_tensor(config_, index, w, [&](const TensorSpec&, at::Tensor& tensor) { all.push_back(tensor); });
  std::erase_if(all, [](const at::Tensor& t) { return !t.defined() || !t.requires_grad(); });
  return all;
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

  Pass pass{.batch = batch, .length = length, .spans = in.spans, .caches = in.caches, .keep_input = in.all_hidden};
  if (in.training) {
    in.training->rows = batch;
    in.training->sequence_rank = sequence_rank;
    in.training->sequence_size = sequence_size;
    pass.training = &*in.training;
  }
  pass.longest = sequence_size * length;
  for (const SequenceCache* cache : in.caches) pass.longest = std::max(pass.longest, cache->length() + length);
  if (in.watch) pass.watch = &in.watch;
  pass.visible = components_.attention->visible({config_, length * sequence_size, pass.training});
  const bool recompute = c10::GradMode::is_enabled() && in.training && in.training->checkpointing != Checkpointing::off;

  ForwardOutput out;
  LayerState state;
  state.x = at::embedding(parallel_.embedding ? parallel_.embedding() : weights_.embedding, in.tokens).to(dtype_);
  state.position = components_.positions->start({config_, positions, planned, dtype_, pass.training});
  for (std::int64_t i = 0; i < config_.layers; ++i) {
    if (in.all_hidden) out.hidden.push_back(state.x);
    if (in.all_positions) out.positions.push_back(state.position.query);
    if (length > 1) check_interrupted();  // a long input may take a while; a single token never does
    state = recompute ? checkpointed_layer(*this, i, state, pass) : decoder_layer(*this, i, state, pass);
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
  return components_.adapter->project({config_.layers, {&which, 1}, {&frozen, 1}, own ? &*own : nullptr, false},
                                      hidden)[0];
}

at::ScalarType default_dtype(const Checkpoint& checkpoint, at::Device device) {
  const at::ScalarType stored = checkpoint.dtype();
  if (stored == at::kDouble || !device.is_cpu()) return stored;
  return stored == at::kBFloat16 && cpu_has_fast_bf16() ? stored : at::kFloat;
}

}  // namespace tapetune
