#include "model/cache.h"

#include "core/error.h"

namespace tapetune {

SequenceCache::SequenceCache(const ModelConfig& config, std::int64_t capacity, const at::TensorOptions& options,
                             bool with_positions)
    : capacity_(capacity) {
  const std::vector<std::int64_t> shape{config.kv_heads, capacity, config.head_dim};
  // Positions are as precise as without a cache.
  const bool narrow = options.dtype() != at::kDouble;
  for (std::int64_t i = 0; i < config.layers; ++i) {
    layers_.push_back({at::empty(shape, options), at::empty(shape, options),
                       with_positions ? at::empty(shape, narrow ? options.dtype(at::kFloat) : options) : at::Tensor()});
  }
}

SequenceCache::View SequenceCache::append(std::int64_t layer, const View& next) {
  const std::int64_t tokens = next.k.size(1);
  if (length_ + tokens > capacity_) {
    fail("cache", "{} tokens do not fit after {}: the cache was made for {}.", tokens, length_, capacity_);
  }
  const View& all = layers_[static_cast<std::size_t>(layer)];
  const auto store = [&](const at::Tensor& room, const at::Tensor& part) {
    if (!part.defined()) return at::Tensor();
    room.narrow(1, length_, tokens).copy_(part);
    return room.narrow(1, 0, length_ + tokens);
  };
  return {store(all.k, next.k), store(all.v, next.v), store(all.position, next.position)};
}

void SequenceCache::truncate(std::int64_t tokens) {
  if (tokens < 0 || tokens > length_) fail("cache", "{} tokens cannot be kept of {}.", tokens, length_);
  length_ = tokens;
}

}  // namespace tapetune
