#include "model/cache.h"

#include "core/error.h"

namespace tapetune {

SequenceCache::SequenceCache(const ModelConfig& config, std::int64_t capacity, const at::TensorOptions& options)
    : capacity_(capacity) {
  for (std::int64_t i = 0; i < config.layers; ++i) {
    k_.push_back(at::empty({config.kv_heads, capacity, config.head_dim}, options));
    v_.push_back(at::empty({config.kv_heads, capacity, config.head_dim}, options));
  }
}

SequenceCache::View SequenceCache::append(std::int64_t layer, const at::Tensor& k, const at::Tensor& v) {
  const std::int64_t tokens = k.size(1);
  if (length_ + tokens > capacity_) {
    fail("cache", "{} tokens do not fit after {}: the cache was made for {}.", tokens, length_, capacity_);
  }
  const auto at_layer = static_cast<std::size_t>(layer);
  k_[at_layer].narrow(1, length_, tokens).copy_(k);
  v_[at_layer].narrow(1, length_, tokens).copy_(v);
  return {k_[at_layer].narrow(1, 0, length_ + tokens), v_[at_layer].narrow(1, 0, length_ + tokens)};
}

}  // namespace tapetune
