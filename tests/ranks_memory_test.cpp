// What ranks hold that share a sequence or the base weights. Ranks are threads here, so that one allocator sees the
// tensors of all.
#include <ATen/Parallel.h>

#include "adapters/build_model.h"
#include "catch.h"
#include "distributed/sharded_base.h"
#include "distributed/ulysses.h"
#include "support.h"
#include "thread_ranks.h"

namespace ranks_memory_test {

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
double held(int count, const std::string& method, Checkpointing checkpointing) {
  const ModelConfig shape = config();
  Ranks ranks(count);
  ranks.each([&](Rank& rank) {
    rank.adapted =
        std::make_unique<AdaptedModel>(adapt(shape, random_weights(shape, 1), parse_method(method, {}), at::kFloat));
    Parallel parallel;
    ulysses(parallel, rank.world->group("sequence"), shape);
    rank.adapted->model.share(rank.adapted->model.weights(), parallel);
    rank.in.tokens = at::ones({1, tokens / count}, at::kLong);
    rank.in.training = Training{checkpointing};
    rank.step();  // gradients are there before the second, as in accumulation
  });
  return most_memory([&] { ranks.each([](Rank& rank) { rank.step(); }); });
}

// The same numbers of threads on any machine: each has room of its own for attention.
struct OneThread {
  OneThread() { at::set_num_threads(1); }
  ~OneThread() { at::set_num_threads(before); }
  int before = at::get_num_threads();
};

}  // namespace

TEST_CASE("ranks: two that share a sequence hold half of its activations each") {
  // Besides, the messages of one layer. TAPE's positions are needed where their tokens are and where their heads are,
  // so that without checkpointing those of all layers are there twice.
  struct Case {
    const char* method;
    Checkpointing checkpointing;
    double most;  // of both together
  };
  const OneThread one;
  for (const Case& c : {Case{"lora", Checkpointing::off, 1.04}, Case{"longlora", Checkpointing::off, 1.05},
                        Case{"theta-scaling", Checkpointing::off, 1.04}, Case{"tape", Checkpointing::off, 1.10},
                        Case{"lora", Checkpointing::selective, 1.15}, Case{"lora", Checkpointing::full, 1.15},
                        Case{"tape", Checkpointing::full, 1.15}}) {
    const double alone = held(1, c.method, c.checkpointing), both = held(2, c.method, c.checkpointing);
    INFO(c.method << ": " << alone / 1e6 << " MB alone, " << both / 1e6 << " MB in two halves");
    CHECK(both > 0.9 * alone);
    CHECK(both < c.most * alone);
  }
}

TEST_CASE("ranks: four that share the base hold a quarter of it and two layers each") {
  const OneThread one;
  ModelConfig shape = config();
  shape.hidden_size = 256;
  shape.intermediate_size = 688;
  shape.head_dim = 32;
  const LlamaWeights whole = random_weights(shape, 1);
  double frozen = 0, layer = 0, trained = 0;
  for (const Linear* linear : linears(whole.layers.front())) layer += static_cast<double>(linear->weight.nbytes());
  frozen = layer * static_cast<double>(shape.layers) + static_cast<double>(whole.embedding.nbytes()) +
           static_cast<double>(whole.head.weight.nbytes());
  for (const Parameter& p : adapt(shape, whole, parse_method("lora", {}), at::kFloat).parameters) {
    trained += static_cast<double>(p.value.nbytes());
  }
  Ranks ranks(4);
  const double held = most_memory([&] {
    ranks.each([&](Rank& rank) {
      AdaptedModel adapted = adapt(shape, whole, parse_method("lora", {}), at::kFloat);
      LlamaWeights weights = adapted.model.weights();
      Parallel parallel;
      shard_base(weights, rank.world->group("base"), parallel, at::kCPU);
      adapted.model.share(weights, parallel);
      rank.adapted = std::make_unique<AdaptedModel>(std::move(adapted));
      rank.in.tokens = at::ones({1, 8}, at::kLong);  // so few that their activations hardly count
      rank.in.training = Training{Checkpointing::full};
      rank.step();
      rank.step();
    });
  });
  const double expected = frozen / 4 + 2 * layer + 2 * trained;  // with its gradients
  INFO(held / 4e6 << " MB a rank, of " << frozen / 1e6 << " MB with layers of " << layer / 1e6);
  CHECK(held / 4 > 0.97 * expected);
  CHECK(held / 4 < 1.05 * expected);
}

}  // namespace ranks_memory_test
