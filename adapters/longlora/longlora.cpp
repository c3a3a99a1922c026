#include "adapters/longlora/longlora.h"

#include "adapters/lora/lora.h"
#include "core/error.h"

namespace tapetune {

namespace {

class ShiftedGroups final : public AttentionPattern {
 public:
  explicit ShiftedGroups(double group) : group_(group) {}

  kernels::Visible visible(const VisibleInput& in) const override {
    if (in.training == nullptr) return {};
    const std::int64_t length = in.length, half = in.config.heads / 2;
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
    kernels::Visible visible;
    visible.regions = {{.head = 0, .heads = half, .starts = {}}, {.head = half, .heads = half, .starts = {}}};
    for (std::int64_t at = 0; at < length; at += size) visible.regions[0].starts.push_back(at);
    // Half a group, whole groups, half a group: the authors' other form rolls the sequence round instead, and its first
    // tokens then see the last ones, which are their future.
    visible.regions[1].starts.push_back(0);
    for (std::int64_t at = size / 2; at < length; at += size) visible.regions[1].starts.push_back(at);
    return visible;
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
  model.components.attention = std::make_shared<ShiftedGroups>(model.options.group);
}

}  // namespace tapetune
