#include "model/rotary.h"

namespace tapetune {

namespace {

double yarn_scale(double factor, double mscale) { return factor <= 1 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0; }

Frequencies yarn(const RopeConfig& rope, std::int64_t dim, const at::Tensor& wave) {
  // The index of the frequency that makes this many turns over the original context.
  const auto turning = [&](double turns) {
    return static_cast<double>(dim) * std::log(static_cast<double>(rope.original_context) / (turns * 2 * M_PI)) /
           (2 * std::log(rope.theta));
  };
  double low = turning(rope.beta_fast), high = turning(rope.beta_slow);
  if (rope.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, static_cast<double>(dim - 1));
  if (low == high) high += 0.001;
  const at::Tensor ramp = ((at::arange(dim / 2, wave.options()) - low) / (high - low)).clamp(0, 1);
  const at::Tensor kept = 1 - ramp;  // fast frequencies stay, slow ones are interpolated
  const at::Tensor interpolated = 1.0 / (rope.factor * wave), original = 1.0 / wave;
  double factor = 1.0;
  if (rope.attention_factor) {
    factor = *rope.attention_factor;
  } else if (rope.mscale.value_or(0) != 0 && rope.mscale_all_dim.value_or(0) != 0) {
    factor = yarn_scale(rope.factor, *rope.mscale) / yarn_scale(rope.factor, *rope.mscale_all_dim);
  } else {
    factor = yarn_scale(rope.factor, 1.0);
  }
  return {interpolated * (1 - kept) + original * kept, factor};
}

at::Tensor llama3(const RopeConfig& rope, const at::Tensor& inverse) {
  const auto original = static_cast<double>(rope.original_context);
  const double longest = original / rope.low_freq_factor, shortest = original / rope.high_freq_factor;
  const at::Tensor length = 2 * M_PI / inverse;
  const at::Tensor scaled = at::where(length > longest, inverse / rope.factor, inverse);
  const at::Tensor smooth = (original / length - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor);
  const at::Tensor blended = (1 - smooth) * scaled / rope.factor + smooth * scaled;
  const at::Tensor between = at::logical_and(length >= shortest, length <= longest);
  return at::where(between, blended, scaled);
}

}  // namespace

Frequencies rotary_frequencies(const RopeConfig& rope, std::int64_t head_dim, std::int64_t context, std::int64_t length,
                               at::ScalarType dtype) {
  const auto dim = static_cast<double>(head_dim);
  const auto precise = dtype == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor exponent = at::arange(0, head_dim, 2, precise) / dim;  // [D/2]
  const auto wave = [&](double theta) { return at::pow(theta, exponent); };
  switch (rope.type) {
    case RopeType::standard:
      return {1.0 / wave(rope.theta)};
    case RopeType::linear:
      return {1.0 / wave(rope.theta) / rope.factor};
    case RopeType::dynamic: {
      const double growth = static_cast<double>(std::max(length, context)) / static_cast<double>(context);
      const double scale = std::pow(rope.factor * growth - (rope.factor - 1), dim / (dim - 2));
      return {1.0 / wave(rope.theta * scale)};
    }
    case RopeType::yarn:
      return yarn(rope, head_dim, wave(rope.theta));
    case RopeType::llama3:
      return {llama3(rope, 1.0 / wave(rope.theta))};
    case RopeType::longrope: {
      const std::vector<double>& factors = length > rope.original_context ? rope.long_factor : rope.short_factor;
      const at::Tensor stretch = at::tensor(factors, at::kDouble).to(precise);
      const double attention =
          rope.factor <= 1
              ? 1.0
              : std::sqrt(1 + std::log(rope.factor) / std::log(static_cast<double>(rope.original_context)));
      return {1.0 / (stretch * wave(rope.theta)), rope.attention_factor.value_or(attention)};
    }
  }
  return {};
}

std::int64_t equivalent_length(const RopeConfig& rope, std::int64_t context, std::int64_t length) {
  if (rope.type == RopeType::dynamic) return std::max(length, context);
  if (rope.type == RopeType::longrope) return rope.original_context + (length > rope.original_context ? 1 : 0);
  return context;
}

at::Tensor cos_sin(const Frequencies& frequencies, const at::Tensor& positions, at::ScalarType dtype) {
  // f32 whatever else the model computes in: bf16 cannot tell position 257 from 256.
  const auto precise = dtype == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor angles = positions.to(precise).unsqueeze(-1).unsqueeze(-1) *
                            frequencies.inverse.to(positions.device(), precise);  // [B|1, N, 1, D/2]
  return at::cat({at::cos(angles), at::sin(angles)}, -1) * frequencies.attention_factor;
}

}  // namespace tapetune
