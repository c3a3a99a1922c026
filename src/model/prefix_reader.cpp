#include "model/prefix_reader.h"

#include "core/error.h"

namespace tapetune {

PrefixReader::PrefixReader(const Llama& model, std::int64_t capacity)
    : model_(model), cache_(model.make_cache(capacity)) {}

at::Tensor PrefixReader::read(std::span<const std::int64_t> tokens, std::int64_t planned_length, std::int64_t keep) {
  if (tokens.empty()) fail("model", "there is no token to read.");
  const std::int64_t rotary = model_.components().positions->same_length(model_.config(), planned_length);
  if (rotary != rotary_length_) keep = 0;
  const auto [own, held] = std::mismatch(tokens.begin(), tokens.end() - 1, text_.begin(), text_.end());
  const std::int64_t kept = std::min<std::int64_t>(keep, own - tokens.begin());
  text_.resize(static_cast<std::size_t>(kept));  // an interrupted forward must leave nothing half-read behind
  cache_.truncate(kept);
  rotary_length_ = rotary;

  const c10::NoGradGuard evaluation;
  const std::span<const std::int64_t> rest = tokens.subspan(static_cast<std::size_t>(kept));
  ForwardInput in;
  in.tokens = at::tensor(at::ArrayRef<std::int64_t>(rest.data(), rest.size()), at::kLong).unsqueeze(0);  // [1, n]
  in.planned_length = rotary;
  in.caches = {&cache_};
  const at::Tensor states = model_.forward(in).last[0];
  text_.assign(tokens.begin(), tokens.end());
  computed_ += static_cast<std::int64_t>(rest.size());
  return states;
}

}  // namespace tapetune
