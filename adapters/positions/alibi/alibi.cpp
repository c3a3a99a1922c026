#include "adapters/positions/alibi/alibi.h"

#include <c10/core/InferenceMode.h>

#include <bit>
#include <cmath>
#include <mutex>

#include "adapters/positions/own_architecture.h"

namespace tapetune {

namespace {

// m_h: 2^(-8 (h + 1) / n) for the first n heads, n the largest power of two there are; the others take every second
// slope of twice as many heads, from the first.
std::vector<double> alibi_slopes(std::int64_t heads) {
  const auto n = static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(heads)));
  std::vector<double> slopes;
  slopes.reserve(static_cast<std::size_t>(heads));
  for (std::int64_t h = 0; h < heads; ++h) {
    const double exponent = h < n ? -8.0 * static_cast<double>(h + 1) : -4.0 * static_cast<double>(2 * (h - n) + 1);
    slopes.push_back(std::exp2(exponent / static_cast<double>(n)));
  }
  return slopes;
}

class AlibiEncoding final : public PositionEncoding {
 public:
  explicit AlibiEncoding(std::vector<double> slopes) : slopes_(std::move(slopes)) {}

  PositionState start(const PositionInput&) const override { return {}; }
  std::int64_t same_length(const ModelConfig&, std::int64_t) const override { return 1; }

  // -m_h d at distance d; by distance and not by place, which would lose digits in long texts. Decoding asks for it at
  // every token, so that the table is kept and grows by doubling.
  at::Tensor score_bias(const BiasInput& in) const override {
    const std::lock_guard lock(mutex_);
    const bool fits = table_.defined() && table_.size(1) >= in.length && table_.dtype() == in.options.dtype() &&
                      table_.device() == in.options.device();
    if (!fits) {
      const c10::InferenceMode no_inference(false);  // a table that training may use too
      const auto length = static_cast<double>(std::bit_ceil(static_cast<std::uint64_t>(in.length)));
      const at::Tensor slopes = at::tensor(slopes_, at::kDouble).unsqueeze(1);  // [H, 1]
      const at::Tensor back = at::arange(length, at::kDouble).unsqueeze(0);     // [1, length]
      table_ = (slopes * back).neg_().to(in.options.requires_grad(false));
    }
    return table_.narrow(1, 0, in.length);
  }

 private:
  std::vector<double> slopes_;
  mutable std::mutex mutex_;
  mutable at::Tensor table_;  // [H, longest]
};

}  // namespace

PositionComponent alibi_component() {
  PositionComponent component;
  component.name = "alibi";
  component.summary = "scores fall with distance, by a slope for each head";
  component.title = "ALiBi";
  component.make = [](const Settings&, ModelBuilder& model) -> std::shared_ptr<const PositionEncoding> {
    return std::make_shared<const AlibiEncoding>(alibi_slopes(model.config.heads));
  };
  component.export_files = export_own_architecture;
  component.card = "A Llama whose positions are ALiBi, merged by tapetune, which is the only program that reads it.";
  return component;
}

}  // namespace tapetune
