// What ranks hold that share a sequence. Ranks are threads here, so that one allocator sees the tensors of all.
#include "distributed/sequence.h"

#include <ATen/Parallel.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <future>

#include "adapters/adapter.h"
#include "catch.h"
#include "distributed/world.h"
#include "model/loss.h"
#include "support.h"

using namespace tapetune;
using namespace tapetune::test;

namespace {

constexpr std::int64_t tokens = 768;

// Narrow inner layers, so that what attention keeps is a large part of all.
ModelConfig config() {
  ModelConfig c;
  c.vocab_size = 64;
  c.hidden_size = 128;
  c.intermediate_size = 64;
  c.layers = 12;
  c.heads = 8;
  c.kv_heads = 8;
  c.head_dim = 16;
  c.context = tokens;
  return c;
}

// The most that a step's activations take, of all ranks together.
double held(int ranks, const std::string& method, Checkpointing checkpointing) {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  const auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  const ModelConfig shape = config();
  struct Rank {
    std::unique_ptr<World> world;
    std::unique_ptr<AdaptedModel> adapted;
    ForwardInput in;
    void step() {
      const at::Tensor hidden = adapted->model.forward(in).last.flatten(0, 1);
      loss_sum(adapted->model, hidden, in.tokens.flatten(), in.training).backward();
    }
  };
  std::vector<Rank> all(static_cast<std::size_t>(ranks));
  const auto each = [&](const std::function<void(int)>& work) {
    std::vector<std::future<void>> running;
    for (int r = 0; r < ranks; ++r) running.push_back(std::async(std::launch::async, work, r));
    for (std::future<void>& one : running) one.get();
  };
  each([&](int r) {
    Rank& rank = all[static_cast<std::size_t>(r)];
    Seat seat;
    seat.rank = r;
    seat.ranks = ranks;
    seat.port = store->getPort();
    seat.served = true;
    rank.world = std::make_unique<World>(seat, std::chrono::seconds(60));
    rank.adapted =
        std::make_unique<AdaptedModel>(adapt(shape, random_weights(shape, 1), parse_method(method, {}), at::kFloat));
    Parallel parallel;
    spread_sequences(parallel, rank.world->group("sequence"), shape);
    rank.adapted->model.share(rank.adapted->model.weights(), parallel);
    rank.in.tokens = at::ones({1, tokens / ranks}, at::kLong);
    rank.in.training = Training{checkpointing};
    rank.step();  // gradients are there before the second, as in accumulation
  });
  return most_memory([&] { each([&](int r) { all[static_cast<std::size_t>(r)].step(); }); });
}

}  // namespace

TEST_CASE("ranks: two that share a sequence hold half of its activations each") {
  // Besides, the messages of one layer. TAPE's positions are needed where their tokens are and where their heads are,
  // so that without checkpointing those of all layers are there twice.
  struct Case {
    const char* method;
    Checkpointing checkpointing;
    double most;  // of both together
  };
  const int threads = at::get_num_threads();
  at::set_num_threads(1);  // each has room of its own for attention
  for (const Case& c : {Case{"lora", Checkpointing::off, 1.04}, Case{"longlora", Checkpointing::off, 1.05},
                        Case{"theta-scaling", Checkpointing::off, 1.04}, Case{"tape", Checkpointing::off, 1.10},
                        Case{"lora", Checkpointing::selective, 1.15}, Case{"lora", Checkpointing::full, 1.15},
                        Case{"tape", Checkpointing::full, 1.15}}) {
    const double alone = held(1, c.method, c.checkpointing), both = held(2, c.method, c.checkpointing);
    INFO(c.method << ": " << alone / 1e6 << " MB alone, " << both / 1e6 << " MB in two halves");
    CHECK(both > 0.9 * alone);
    CHECK(both < c.most * alone);
  }
  at::set_num_threads(threads);
}
