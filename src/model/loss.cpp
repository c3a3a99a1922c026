#include "model/loss.h"

namespace tapetune {

at::Tensor token_losses(const Linear& head, const at::Tensor& hidden, const at::Tensor& targets) {
  // 16 M logits at a time: 64 MB, whatever the vocabulary.
  const std::int64_t block = std::max<std::int64_t>(1, (std::int64_t{1} << 24) / head.weight.size(0));
  const auto precise = hidden.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  std::vector<at::Tensor> parts;
  for (std::int64_t begin = 0; begin < hidden.size(0); begin += block) {
    const std::int64_t count = std::min(block, hidden.size(0) - begin);
    const at::Tensor logits = apply(head, hidden.narrow(0, begin, count)).to(precise);  // [count, vocab]
    const at::Tensor chosen = logits.gather(1, targets.narrow(0, begin, count).unsqueeze(1)).squeeze(1);
    parts.push_back(at::logsumexp(logits, 1) - chosen);
  }
  return at::cat(parts);
}

}  // namespace tapetune
