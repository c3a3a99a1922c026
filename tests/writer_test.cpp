#include "checkpoint/writer.h"

#include "adapters/checkpoints.h"
#include "catch.h"
#include "checkpoint/checkpoint.h"
#include "core/json.h"
#include "support.h"

namespace writer_test {

using namespace tapetune;
using namespace tapetune::test;
namespace fs = std::filesystem;

namespace {

std::vector<PlannedTensor> plan_of(const Checkpoint& checkpoint, at::ScalarType dtype) {
  std::vector<PlannedTensor> plan;
  for (const TensorSpec& tensor : tensor_specs(checkpoint.config())) plan.push_back({tensor.name, dtype, tensor.shape});
  return plan;
}

}  // namespace

TEST_CASE("a written checkpoint holds the same tensors, in one file or in many") {
  const TempFolder folder;
  tiny_checkpoint(folder / "m");
  tiny_tokenizer(folder / "m");
  const Checkpoint before = Checkpoint::open(folder / "m");
  const auto load = [&](const std::string& name) { return before.tensor(name); };
  for (const std::uint64_t shard_bytes : {std::uint64_t{5'000'000'000}, std::uint64_t{20'000}, std::uint64_t{1}}) {
    INFO(shard_bytes);
    write_checkpoint(folder / "out", before.config(), plan_of(before, at::kFloat), load,
                     {shard_bytes, true, folder / "m"});
    const Checkpoint after = Checkpoint::open(folder / "out");
    CHECK(after.stored().size() == before.stored().size());
    for (const auto& [name, stored] : before.stored()) CHECK(at::equal(after.tensor(name), before.tensor(name)));
    if (shard_bytes > 1'000'000) {
      CHECK(after.shards() == 1);
      CHECK_FALSE(fs::exists(folder / "out" / "model.safetensors.index.json"));
    } else {
      const Json index = from_text(read_file(folder / "out" / "model.safetensors.index.json"));
      CHECK(index["metadata"]["total_size"] == before.bytes());
      CHECK(index["weight_map"].size() == before.stored().size());
      CHECK(after.shards() == (shard_bytes == 1 ? before.stored().size() : after.shards()));
      CHECK(after.shards() > 3);
      for (const auto& entry : fs::directory_iterator(folder / "out")) {
        const bool alone = shard_bytes == 1;
        if (entry.path().extension() == ".safetensors" && !alone) CHECK(entry.file_size() < shard_bytes + 4096);
      }
    }
    CHECK(read_file(folder / "out" / "tokenizer.json") == read_file(folder / "m" / "tokenizer.json"));
  }
}

TEST_CASE("a dtype is changed by rounding once") {
  const TempFolder folder;
  tiny_checkpoint(folder / "m");
  const Checkpoint before = Checkpoint::open(folder / "m");
  write_checkpoint(folder / "out", before.config(), plan_of(before, at::kBFloat16),
                   [&](const std::string& name) { return before.tensor(name); });
  const Checkpoint after = Checkpoint::open(folder / "out");
  CHECK(after.dtype() == at::kBFloat16);
  CHECK(from_text(after.config().json)["torch_dtype"] == "bfloat16");
  for (const auto& [name, stored] : before.stored()) {
    CHECK(at::equal(after.tensor(name), before.tensor(name).to(at::kBFloat16)));
  }
}

TEST_CASE("the writer holds no more than two tensors at a time") {
  const TempFolder folder;
  tiny_checkpoint(folder / "m");
  const Checkpoint before = Checkpoint::open(folder / "m");
  int alive = 0, most = 0;
  const auto load = [&](const std::string& name) {
    const at::Tensor source = before.tensor(name).clone();
    most = std::max(most, ++alive);
    return at::from_blob(source.data_ptr(), source.sizes(), [source, &alive](void*) { --alive; }, source.options());
  };
  write_checkpoint(folder / "out", before.config(), plan_of(before, at::kFloat), load, {30'000, false, {}});
  CHECK(alive == 0);
  CHECK(most >= 1);
  CHECK(most <= 2);
}

TEST_CASE("a failure while writing leaves nothing behind") {
  const TempFolder folder;
  tiny_checkpoint(folder / "m");
  const Checkpoint before = Checkpoint::open(folder / "m");
  int calls = 0;
  const auto load = [&](const std::string& name) -> at::Tensor {
    if (++calls == 4) throw std::runtime_error("broken");
    return before.tensor(name);
  };
  CHECK_THROWS_WITH(write_checkpoint(folder / "out", before.config(), plan_of(before, at::kFloat), load), "broken");
  CHECK(std::distance(fs::directory_iterator(folder.path()), fs::directory_iterator()) == 1);
  const auto wrong = [&](const std::string&) { return at::zeros({1}); };
  CHECK_THROWS_WITH(write_checkpoint(folder / "out", before.config(), plan_of(before, at::kFloat), wrong),
                    Contains("planned as"));
}

TEST_CASE("sizes are decimal") {
  CHECK(parse_size("5GB") == 5'000'000'000);
  CHECK(parse_size("200MB") == 200'000'000);
  CHECK(parse_size("7") == 7);
  for (const char* bad : {"", "GB", "-1GB", "5GiB", "1.5GB", "0", "99999999999TB"}) {
    INFO(bad);
    CHECK_THROWS_WITH(parse_size(bad), Contains("is not a size"));
  }
}

TEST_CASE("the writer takes tensors in parts, and refuses too few or too many rows") {
  const TempFolder folder;
  const ModelConfig config = random_config(true);
  std::map<std::string, at::Tensor> tensors;
  std::vector<PlannedTensor> plan;
  for (const auto& [name, tensor] : named_weights(config, random_weights(config, at::kFloat))) {
    tensors[name] = tensor;
    plan.push_back({name, at::kFloat, tensor.sizes().vec()});
  }
  const auto parts = [&](std::int64_t missing) {
    return [&, missing](const std::string& name, const PutRows& put) {
      const at::Tensor& whole = tensors.at(name);
      for (std::int64_t i = 0; i < whole.size(0) - missing; i += 3) {
        put(whole.narrow(0, i, std::min<std::int64_t>(3, whole.size(0) - missing - i)));
      }
      if (missing < 0) put(whole.narrow(0, 0, 1));
    };
  };
  stream_checkpoint(folder / "out", config, plan, parts(0));
  const Checkpoint written = open_checkpoint(folder / "out");
  for (const auto& [name, tensor] : tensors) CHECK(at::equal(written.tensor(name), tensor));
  CHECK_THROWS_WITH(stream_checkpoint(folder / "few", config, plan, parts(1)),
                    Contains("model.embed_tokens.weight: planned as [61, 32], but given as [60, 32]"));
  CHECK_FALSE(fs::exists(folder / "few"));
  const auto twice = [&](const std::string& name, const PutRows& put) {
    put(tensors.at(name));
    put(tensors.at(name));
  };
  CHECK_THROWS_WITH(stream_checkpoint(folder / "many", config, plan, twice), Contains("but given as [122, 32]"));
  CHECK(std::distance(fs::directory_iterator(folder.path()), fs::directory_iterator()) == 1);
}

}  // namespace writer_test
