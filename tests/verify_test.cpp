// verify: whether two models are the same, by their tensors and by their logits.
#include "export/verify.h"

#include "catch.h"
#include "core/json.h"
#include "merge_bench.h"

namespace verify_test {

using namespace tapetune;
using namespace tapetune::test;
using namespace tapetune::test::merging;
namespace fs = std::filesystem;

TEST_CASE("verify: a merge is the run's, to the bit, what was changed is found and named") {
  const Bench bench;
  const fs::path before = bench.make_run("lora", {"scaling=linear", "factor=2", "train_also=norms"});
  const auto words = [&](Words more = {}) {
    more.insert(more.begin(), {"verify", before.string(), bench.out().string()});
    return more;
  };
  for (const char* dtype : {"keep", "bf16"}) {
    INFO(dtype);
    REQUIRE(merge_run(bench, {"--dtype", dtype, "--force"}).exit == 0);
    const RunResult same = run(words({"--json"}));
    CHECK(same.err.empty());
    CHECK(same.exit == 0);
    const Json json = from_text(same.out);
    CHECK(json["agree"] == true);
    CHECK(json["tensors"]["identical"] == json["tensors"]["compared"]);
    CHECK(json["tensors"]["compared"] == 30);
    CHECK(json["logits"]["difference"].get<double>() < (std::string(dtype) == "keep" ? 1e-4 : 0.5));
  }
  CHECK(run(words({"--prompt", "a dog", "--logits-tolerance", "0.2"})).exit == 0);
  CHECK(run(words({"--prompt", "a dog", "--logits-tolerance", "0"})).exit == 1);  // bf16 rounds
  REQUIRE(merge_run(bench, {"--force"}).exit == 0);

  // One number of one tensor.
  const fs::path weights = bench.out() / "model.safetensors";
  at::Tensor norm = load_tensors(weights).at("model.layers.1.input_layernorm.weight").clone();
  norm[3] += 0.25;
  change_tensor(weights, "model.layers.1.input_layernorm.weight", norm);
  const RunResult changed = run(words());
  CHECK(changed.exit == 1);
  CHECK_THAT(changed.err, Contains("are not the same: their tensors differ"));
  CHECK_THAT(changed.out, Contains("30 compared, 29 bit-identical") &&
                              Contains("largest difference 0.25 in model.layers.1.input_layernorm.weight"));
  CHECK(run(words({"--tolerance", "0.3", "--logits-tolerance", "1"})).exit == 0);

  // The same tensors under other rotary settings.
  REQUIRE(merge_run(bench, {"--force"}).exit == 0);
  Json config = from_text(read_file(bench.out() / "config.json"));
  config["rope_scaling"] = nullptr;
  write_file(bench.out() / "config.json", to_text(config));
  const RunResult rotary = run(words());
  CHECK(rotary.exit == 1);
  CHECK_THAT(rotary.err, Contains("the logits differ; compare the two config.json"));
}

TEST_CASE("verify: names, shapes and dtypes of two checkpoints") {
  const Bench bench;
  const std::string base = bench.base().string(), other = (bench.folder / "other").string();
  CHECK(run({"verify", base, base}).exit == 0);
  REQUIRE(run({"convert", base, "--dtype", "bf16", "--out", other}).exit == 0);
  const RunResult narrow = run({"verify", base, other, "--json"});
  CHECK(narrow.exit == 1);
  const Json json = from_text(narrow.out);
  CHECK(json["tensors"]["unlike"].size() == 30);
  CHECK(json["tensors"]["unlike"][0] == "lm_head.weight: F32 [61, 32] and BF16 [61, 32]");
  CHECK(json["tensors"]["largest_relative"]["difference"].get<double>() < 0.005);
  std::map<std::string, at::Tensor> tensors = load_tensors(bench.base() / "model.safetensors");
  tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = at::ones({8});  // a known table; others are refused
  REQUIRE(run({"convert", base, "--out", other, "--force"}).exit == 0);
  save_safetensors(fs::path(other) / "model.safetensors", tensors, true, {{"format", "pt"}});
  const RunResult more = run({"verify", base, other});
  CHECK(more.exit == 1);
  CHECK_THAT(more.out, Contains("only in B: 1\n  model.layers.0.self_attn.rotary_emb.inv_freq"));
}

}  // namespace verify_test
