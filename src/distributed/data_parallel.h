// Gradients that are summed over processes while the backward still computes others: c10d's Reducer.
#pragma once

#include <memory>
#include <span>

#include "adapters/build_model.h"
#include "distributed/group.h"

namespace tapetune {

class DataParallel {
 public:
  DataParallel(std::span<const Parameter> parameters, const Group& group);
  ~DataParallel();
  DataParallel(DataParallel&& other) noexcept;

  // The backward of a step's last micro-batch: every gradient is then the sum over all ranks of what has accumulated.
  // A loss.backward() before it exchanges nothing. Throws RankLost.
  void backward(const at::Tensor& loss);

 private:
  struct Engine;
  std::unique_ptr<Engine> engine_;  // null in a group of one
};

}  // namespace tapetune
