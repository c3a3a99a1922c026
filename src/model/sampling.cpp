#include "model/sampling.h"

#include "checkpoint/finite.h"
#include "core/error.h"

namespace tapetune {

Sampler::Sampler(const SamplingOptions& options) : options_(options), random_(options.seed) {
  if (!(options.temperature >= 0)) fail("sampling", "temperature must be 0 or more, but is {}.", options.temperature);
  if (options.top_k < 0) fail("sampling", "top-k must be 0 (all) or more, but is {}.", options.top_k);
  if (!(options.top_p > 0 && options.top_p <= 1))
    fail("sampling", "top-p must be in (0, 1], but is {}.", options.top_p);
}

std::int64_t Sampler::next(const at::Tensor& logits) {
  if (!all_finite(logits)) {
    throw_not_finite("model",
                     "the logits have NaN or Inf; the model's weights or its dtype are broken (try --dtype f32).");
  }
  if (options_.temperature == 0) return logits.argmax().item<std::int64_t>();
  const std::int64_t kept = options_.top_k == 0 ? logits.numel() : std::min(options_.top_k, logits.numel());
  const auto [values, ids] = at::topk(logits.to(at::kDouble), kept);  // sorted, so that top-p is a prefix
  const at::Tensor weights = at::softmax(values / options_.temperature, 0).contiguous();
  const double* weight = weights.const_data_ptr<double>();
  std::int64_t count = 0;
  double mass = 0;
  while (count < kept && mass < options_.top_p) mass += weight[count++];
  // Not std::discrete_distribution: its results differ between standard libraries, and a seed should mean one text.
  double left = static_cast<double>(random_() >> 11) * 0x1.0p-53 * mass;
  std::int64_t chosen = 0;
  while (chosen + 1 < count && left >= weight[chosen]) left -= weight[chosen++];
  return ids[chosen].item<std::int64_t>();
}

}  // namespace tapetune
