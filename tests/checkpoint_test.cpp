#include "checkpoint/checkpoint.h"
#include "catch.h"
#include "checkpoint/writer.h"
#include "hf/safetensors.h"
#include "support.h"

namespace checkpoint_test {

using namespace tapetune;
using namespace tapetune::test;

TEST_CASE("a checkpoint's tensors are mapped, not copied") {
  const TempFolder folder;
  tiny_checkpoint(folder / "m");
  const Checkpoint checkpoint = Checkpoint::open(folder / "m");
  CHECK(checkpoint.dtype() == at::kFloat);
  CHECK(checkpoint.stored().size() == load_tensors(data("tiny-model.safetensors")).size());
  const StoredTensor& stored = checkpoint.stored().find("model.norm.weight")->second;
  const at::Tensor tensor = checkpoint.tensor("model.norm.weight");
  CHECK(tensor.const_data_ptr() == static_cast<const void*>(stored.bytes.data()));
  CHECK_THROWS_WITH(checkpoint.tensor("model.nothing"), Contains("has no tensor model.nothing"));
}

TEST_CASE("a mapped tensor outlives its checkpoint") {
  const TempFolder folder;
  tiny_checkpoint(folder / "m");
  const at::Tensor tensor = Checkpoint::open(folder / "m").tensor("model.norm.weight");
  CHECK(at::isfinite(tensor).all().item<bool>());
}

TEST_CASE("unaligned data is copied, and every dtype is read as it was written") {
  const TempFolder folder;
  const at::Tensor bytes = at::arange(3, at::kByte);
  std::map<std::string, at::Tensor> tensors{{"f32", at::rand({3})},
                                            {"f64", at::rand({2}, at::kDouble)},
                                            {"f16", at::rand({3}).to(at::kHalf)},
                                            {"bf16", at::rand({5}).to(at::kBFloat16)},
                                            {"i64", at::arange(4)},
                                            {"i32", at::arange(4, at::kInt)},
                                            {"i16", at::arange(3, at::kShort)},
                                            {"i8", at::arange(3, at::kChar)},
                                            {"u8", bytes},
                                            {"bool", at::tensor({1, 0, 1}).to(at::kBool)},
                                            {"scalar", at::scalar_tensor(3.5)},
                                            {"empty", at::empty({0, 4})}};
  save_safetensors(folder / "all.safetensors", tensors, false);
  for (const auto& [name, tensor] : load_tensors(folder / "all.safetensors")) {
    INFO(name);
    CHECK(tensor.scalar_type() == tensors[name].scalar_type());
    CHECK(at::equal(tensor, tensors[name]));
  }
  // The same float behind a header whose length is not a multiple of four.
  const std::string json = R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}} )";
  REQUIRE((8 + json.size()) % 4 != 0);
  std::string file(8, '\0');
  file[0] = static_cast<char>(json.size());
  const float value = 1.5F;
  file += json + std::string(reinterpret_cast<const char*>(&value), 4);
  write_file(folder / "odd.safetensors", file);
  const at::Tensor odd = load_tensors(folder / "odd.safetensors")["x"];
  CHECK(odd.item<float>() == value);
  CHECK(reinterpret_cast<std::uintptr_t>(odd.const_data_ptr()) % 4 == 0);
}

}  // namespace checkpoint_test
