// Ranks that are threads of one process: one allocator sees the tensors of all, and a test can compare them.
#pragma once

#include <future>
#include <memory>
#include <vector>

#include "adapters/build_model.h"
#include "distributed/rendezvous.h"
#include "distributed/world.h"
#include "model/loss.h"

namespace tapetune::test {

struct Rank {
  std::unique_ptr<World> world;
  std::unique_ptr<AdaptedModel> adapted;
  ForwardInput in;
  void step() {
    const at::Tensor hidden = adapted->model.forward(in).last.flatten(0, 1);
    loss_sum(adapted->model, hidden, in.tokens.flatten(), in.training).backward();
  }
};

// Ranks after their rendezvous, each in a thread of its own whenever they do something.
class Ranks {
 public:
  explicit Ranks(int count) : all_(static_cast<std::size_t>(count)) {
    each([&](Rank& rank) {
      RankInfo info;
      info.rank = static_cast<int>(&rank - all_.data());
      info.ranks = count;
      info.port = store_->getPort();
      info.served = true;
      rank.world = std::make_unique<World>(info, std::chrono::seconds(60));
    });
  }
  void each(const std::function<void(Rank&)>& work) {
    std::vector<std::future<void>> running;
    for (Rank& rank : all_) running.push_back(std::async(std::launch::async, work, std::ref(rank)));
    for (std::future<void>& one : running) one.get();
  }

 private:
  c10::intrusive_ptr<c10d::TCPStore> store_ = open_rendezvous();
  std::vector<Rank> all_;
};

}  // namespace tapetune::test
