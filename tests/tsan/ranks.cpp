// Ranks as threads of one process, under the thread sanitizer (tools/tsan): what a rank's training thread, its
// heartbeat, the threads on which collectives end and the one that looks for a culprit do to each other's memory.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdio>
#include <cstdlib>
#include <thread>

#include "core/error.h"
#include "core/trace.h"
#include "distributed/data_parallel.h"
#include "distributed/world.h"

using namespace tapetune;

namespace {

constexpr int ranks = 3;

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "not so: %s\n", what);
  std::abort();
}

void exchange(World& world) {
  const Group all = world.group("all"), pairs = world.group("pairs", world.rank() / 2);
  require(all.size() == ranks && pairs.size() == (world.rank() < 2 ? 2 : 1), "groups have their members");
  for (int round = 0; round < 20; ++round) {
    const trace::Span span("round", round);
    world.begin_step(round);
    at::Tensor sum = at::full({1000}, world.rank() + 1.0F), whole = at::empty({ranks * 64});
    const at::Tensor part = at::full({64}, static_cast<float>(world.rank())),
                     rows = at::full({ranks, 8}, static_cast<float>(world.rank())), came = at::empty({ranks, 8});
    // All under way at once, as a step has them.
    const Group::Pending first = all.all_reduce(sum), second = all.all_gather(whole, part),
                         third = all.all_to_all(came, rows);
    const std::vector<std::string> said = world.all_gather(std::to_string(world.rank() * round));
    first.wait(), second.wait(), third.wait();
    require(sum[0].item<float>() == 6 && sum[999].item<float>() == 6, "an all-reduce sums over all");
    require(whole[0].item<float>() == 0 && whole[-1].item<float>() == ranks - 1, "an all-gather has all parts");
    require(came[0][0].item<float>() == 0 && came[-1][7].item<float>() == ranks - 1, "an all-to-all has all rows");
    require(said.size() == ranks && said[2] == std::to_string(2 * round), "all_gather gives every rank all texts");
  }
}

void share_gradients(World& world) {
  std::vector<Parameter> parameters;
  for (int i = 0; i < 6; ++i) {
    parameters.push_back({fmt::format("model.layers.{}.x", i), at::full({20000}, 0.5F).requires_grad_(true), ""});
  }
  DataParallel gradients(parameters, world.group("gradients"));
  for (int step = 0; step < 5; ++step) {
    at::Tensor loss = at::zeros({});
    for (const Parameter& p : parameters) loss = loss + (p.value * p.value).sum() * (world.rank() + 1.0);
    gradients.backward(loss);
    for (const Parameter& p : parameters) {
      require(std::abs(p.value.grad()[0].item<float>() - 6) < 1e-5, "gradients are the sum over ranks");
      p.value.mutable_grad().reset();
    }
  }
}

void fail_and_diagnose(World& world) {
  if (world.rank() == 1) {
    require(world.diagnose("[test] out of luck").empty(), "the rank at fault leaves it to rank 0");
    return;
  }
  try {
    for (;;) world.all_gather("still here");
  } catch (const RankLost& lost) {
    const std::string told = world.diagnose(lost.what());
    if (world.is_rank0())
      require(told.find("rank 1") != std::string::npos && told.find("luck") != std::string::npos, told.c_str());
    world.confirm_failure();
  }
}

}  // namespace

int main() {
  trace::begin();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([rank] {
      RankInfo info;
      info.rank = rank;
      info.ranks = ranks;
      info.port = 29577;
      World world(info, std::chrono::seconds(60));
      exchange(world);
      share_gradients(world);
      fail_and_diagnose(world);
    });
  }
  for (std::thread& thread : threads) thread.join();
  require(trace::events(0).size() > ranks * 20, "spans were kept");
  std::puts("1 passed, 0 failed");
}
