#include "eval/gradients.h"

#include <ATen/ops/tensor.h>

#include "core/error.h"
#include "model/loss.h"

namespace tapetune {

std::map<std::string, at::Tensor> loss_and_gradients(const AdaptedModel& adapted,
                                                     const std::vector<std::int64_t>& tokens,
                                                     Checkpointing checkpointing, std::uint64_t seed) {
  const at::Tensor all = at::tensor(tokens, at::kLong);
  const std::int64_t length = all.size(0);
  ForwardInput in;
  in.tokens = all.unsqueeze(0);
  in.training = Training{checkpointing, seed, /*dropout=*/false};
  const at::Tensor hidden = adapted.model.forward(in).last[0];  // [N, hidden]
  const at::Tensor loss = loss_sum(adapted.model, hidden.narrow(0, 0, length - 1), all.narrow(0, 1, length - 1)) /
                          static_cast<double>(length - 1);
  loss.backward();
  std::map<std::string, at::Tensor> tensors{{"loss", loss.detach()}};
  for (const Parameter& p : adapted.parameters) {
    if (p.value.grad().defined()) tensors["grad." + p.name] = p.value.grad();
  }
  return tensors;
}

}  // namespace tapetune
