#include "adapters/attention/shifted_groups/shifted_groups.h"

#include <cmath>

#include "core/error.h"

namespace tapetune {

namespace {

// Tokens of a group, which may be given as a share of the sequence.
double wanted_tokens(double group, std::int64_t length) {
  return group < 1 ? group * static_cast<double>(length) : group;
}

// The same as a whole number; none where such groups do not fit.
std::optional<std::int64_t> group_size(double group, std::int64_t length) {
  const double wanted = wanted_tokens(group, length);
  const auto size = static_cast<std::int64_t>(std::llround(wanted));
  // A third of the sequence is written as 0.333333.
  const bool whole = std::abs(static_cast<double>(size) - wanted) <= 1e-5 * wanted;
  const bool fits = whole && size >= 2 && size % 2 == 0 && length % size == 0;
  return fits ? std::optional(size) : std::nullopt;
}

class ShiftedGroups final : public AttentionPattern {
 public:
  explicit ShiftedGroups(double group) : group_(group) {}

  kernels::Visible visible(const VisibleInput& in) const override {
    if (in.training == nullptr) return {};
    const std::int64_t length = in.length, half = in.config.heads / 2;
    const std::optional<std::int64_t> size = group_size(group_, length);
    if (!size) {
      fail("attention",
           "a group of {:g} tokens does not fit a sequence of {}: it must be even and divide the sequence; set group, "
           "or use another length.",
           wanted_tokens(group_, length), length);
    }
    kernels::Visible visible;
    visible.regions = {{.head = 0, .heads = half, .starts = {}}, {.head = half, .heads = half, .starts = {}}};
    for (std::int64_t at = 0; at < length; at += *size) visible.regions[0].starts.push_back(at);
    // Half a group, whole groups, half a group: the authors' other form rolls the sequence round instead, and its first
    // tokens then see the last ones, which are their future.
    visible.regions[1].starts.push_back(0);
    for (std::int64_t at = *size / 2; at < length; at += *size) visible.regions[1].starts.push_back(at);
    return visible;
  }

 private:
  double group_;
};

std::vector<Problem> check_groups(const Settings& settings, const RecipeFacts& facts) {
  std::vector<Problem> problems;
  const double group = settings.number("group");
  if (facts.context > 0 && !group_size(group, facts.context)) {
    problems.push_back(
        {"group", fmt::format("makes groups of {:g} tokens, which do not fit context {}: a group must be "
                              "even and divide it.",
                              wanted_tokens(group, facts.context), facts.context)});
  }
  if (facts.heads % 2 != 0) {
    problems.push_back(
        {"", fmt::format("half of the heads have shifted groups, but the model has {}: an even number is needed.",
                         facts.heads)});
  }
  return problems;
}

}  // namespace

PatternComponent shifted_groups_component() {
  PatternComponent component;
  component.name = "shifted";
  component.summary = "groups of tokens while training, shifted for half of the heads (LongLoRA)";
  component.keys = {{"group", "attention group in training: a share of the sequence, or a number of tokens",
                     Key::Type::number, 0.25, 1e-9, 1e12, "a share below 1 or a number of tokens"}};
  component.check = check_groups;
  component.make = [](const Settings& settings, ModelBuilder&) -> std::shared_ptr<const AttentionPattern> {
    return std::make_shared<const ShiftedGroups>(settings.number("group"));
  };
  return component;
}

}  // namespace tapetune
