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
  DataParallel(const DataParallel&) = delete;
  DataParallel& operator=(const DataParallel&) = delete;

  // The backward of this loss, the last of a step, exchanges what has accumulated: every gradient is then the sum over
  // all ranks. A backward without this call exchanges nothing.
  void exchange_in_backward(const at::Tensor& loss);

 private:
  struct Engine;
  std::unique_ptr<Engine> engine_;  // null in a group of one
};

}  // namespace tapetune
