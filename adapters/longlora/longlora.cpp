#include "adapters/longlora/longlora.h"

#include "adapters/lora/lora.h"
#include "core/error.h"

namespace tapetune {

namespace {

class ShiftedGroups final : public AttentionSeam {
 public:
  explicit ShiftedGroups(double group) : group_(group) {}

  kernels::Cuts cuts(const ModelConfig&, std::int64_t length, const Training* training) const override {
    if (training == nullptr) return {};
    const double wanted = group_ < 1 ? group_ * static_cast<double>(length) : group_;
    const auto size = static_cast<std::int64_t>(std::llround(wanted));
    // A third of the sequence is written as 0.333333.
    if (std::abs(static_cast<double>(size) - wanted) > 1e-5 * wanted || size < 2 || size % 2 != 0 ||
        length % size != 0) {
      fail("longlora",
           "a group of {:g} tokens does not fit a sequence of {}: it must be even and divide the sequence; set group, "
           "or "
           "use another length.",
           wanted, length);
    }
    kernels::Cuts cuts;
    for (std::int64_t at = 0; at < length; at += size) cuts.first.push_back(at);
    // Half a group, whole groups, half a group: the authors' other form rolls the sequence round instead, and its first
    // tokens then see the last ones, which are their future.
    cuts.second.push_back(0);
    for (std::int64_t at = size / 2; at < length; at += size) cuts.second.push_back(at);
    return cuts;
  }

 private:
  double group_;
};

}  // namespace

void make_longlora(ModelBuilder& model) {
  if (model.config.heads % 2 != 0) {
    fail("longlora", "half of the heads are shifted, but the model has {}: an even number is needed.",
         model.config.heads);
  }
  make_lora(model);
  model.seams.attention = std::make_shared<ShiftedGroups>(model.options.group);
}

}  // namespace tapetune
