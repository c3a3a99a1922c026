// Merging in bad company: unfinished runs, changed bases, foreign adapters, full disks and kills.
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <unistd.h>

#include "catch.h"
#include "core/json.h"
#include "merge_bench.h"

namespace merge_safety_test {

using namespace tapetune;
using namespace tapetune::test;
using namespace tapetune::test::merging;
namespace fs = std::filesystem;

TEST_CASE("merge: an adapter without a run takes the base model that it names, or the one that is given") {
  const Bench bench;
  const fs::path before = bench.make_run("lora", {});
  const fs::path adapter = bench.folder / "adapter";
  fs::copy(before / "adapter", adapter);
  merge(open_merge(before), to(bench.folder / "same"));
  const std::string expected = read_file(bench.folder / "same" / "model.safetensors");
  CHECK(run({"merge", adapter.string(), "--out", bench.out().string()}).exit == 0);
  CHECK(read_file(bench.out() / "model.safetensors") == expected);
  CHECK(from_text(read_file(bench.out() / "tapetune_provenance.json"))["recipe"].is_null());

  fs::remove_all(bench.out());
  const std::string moved = (bench.folder / "moved").string();
  fs::rename(bench.base(), moved);
  refused(run({"merge", adapter.string(), "--out", bench.out().string()}),
          Contains("its base model " + bench.base().string()) && Contains("--model DIR"), bench, 4);
  CHECK(run({"merge", adapter.string(), "--model", moved, "--out", bench.out().string()}).exit == 0);
  CHECK(read_file(bench.out() / "model.safetensors") == expected);
}

TEST_CASE("merge: a run that is not finished gives its newest checkpoint, or is refused") {
  const Bench bench;
  const fs::path unfinished = bench.make_run("lora", {});
  fs::create_directories(unfinished / "checkpoints");
  fs::rename(unfinished / "adapter", unfinished / "checkpoints" / "step-7");
  const RunResult result = merge_run(bench);
  CHECK(result.exit == 0);
  CHECK_THAT(result.err, Contains("is not finished") && Contains("step 7"));
  CHECK(from_text(read_file(bench.out() / "tapetune_provenance.json"))["unfinished_at_step"] == 7);
  fs::remove_all(bench.out());
  fs::remove_all(unfinished / "checkpoints");
  refused(merge_run(bench), Contains("has neither a result (adapter) nor a checkpoint yet"), bench, 2);
}

TEST_CASE("merge: a checkpoint of a finished run is not called unfinished") {
  const Bench bench;
  const fs::path finished = bench.make_run("lora", {}), checkpoint = finished / "checkpoints" / "step-1";
  const auto card = [&](const std::string& name) { return read_file(bench.out() / name); };
  fs::create_directories(checkpoint.parent_path());
  fs::copy(finished / "adapter", checkpoint);
  REQUIRE(run({"merge", checkpoint.string(), "--out", bench.out().string()}).exit == 0);
  CHECK_THAT(card("README.md"), Contains("| step 1 of 1 |") && !Contains("unfinished"));
  CHECK_THAT(card("README.md"), Contains("| training | 1 step of "));
  CHECK(from_text(card("tapetune_provenance.json"))["step"] == 1);
  CHECK_FALSE(from_text(card("tapetune_provenance.json")).contains("unfinished_at_step"));
  fs::remove_all(finished / "adapter");
  REQUIRE(run({"merge", checkpoint.string(), "--out", bench.out().string(), "--force"}).exit == 0);
  CHECK_THAT(card("README.md"), Contains("| step 1 of 1, of an unfinished run |"));
}

TEST_CASE("merge: refuses NaN and Inf, with the tensor's name") {
  const Bench bench;
  const fs::path weights = bench.make_run("lora", {"train_also=norms"}) / "adapter" / "adapter_model.safetensors";
  const std::string good = read_file(weights);
  const std::string lora_b = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight";
  change_tensor(weights, lora_b, at::full({16, 8}, NAN));
  refused(merge_run(bench), Contains("[merge] model.layers.1.self_attn.v_proj.weight: the result has NaN or Inf"),
          bench, 2);
  write_file(weights, good);
  change_tensor(weights, "base_model.model.model.norm.weight", at::full({32}, INFINITY));
  refused(merge_run(bench), Contains("[merge] model.norm.weight"), bench, 2);
  write_file(weights, good);
  change_tensor(weights, "base_model.model.model.norm.weight", at::full({32}, 1e5));
  refused(merge_run(bench, {"--dtype", "f16"}), Contains("model.norm.weight") && Contains("--dtype bf16"), bench, 2);
  CHECK(merge_run(bench, {"--dtype", "bf16"}).exit == 0);
}

TEST_CASE("merge: refuses a base that changed since, unless it may be any") {
  const Bench bench;
  bench.make_run("lora", {});
  const fs::path weights = bench.base() / "model.safetensors";
  change_tensor(weights, "model.norm.weight", at::full({32}, 2.0));
  refused(merge_run(bench),
          Contains(bench.base().string()) && Contains("the run was trained on blake3") && Contains("--model") &&
              Contains("--any-base"),
          bench, 2);
  refused(merge_run(bench, {"--adapter"}), Contains("the run was trained on blake3"), bench, 2);
  refused(merge_run(bench, {"--force"}), Contains("the run was trained on blake3"), bench, 2);
  const RunResult any = merge_run(bench, {"--any-base"});
  CHECK(any.exit == 0);
  CHECK_THAT(any.err, Contains("warning: ") && Contains("the run was trained on blake3"));
  const Json json = from_text(read_file(bench.out() / "tapetune_provenance.json"));
  CHECK(json["trained_on"] != json["base"]["hash"]);
}

TEST_CASE("merge: refuses what is no run, a foreign adapter, and places that are not its own") {
  const Bench bench;
  const fs::path before = bench.make_run("lora", {});
  const auto kept = contents(before);
  const auto into = [&](const fs::path& from, const fs::path& out) {
    return run({"merge", from.string(), "--out", out.string(), "--force"});
  };
  refused(into(bench.folder / "nothing", bench.out()), Contains("no such folder"), bench, 2);
  refused(into(bench.base(), bench.out()), Contains("is neither a run"), bench, 2);
  refused(into(before, before / "adapter"), Contains("which a merge must not touch"), bench, 2);
  refused(into(before, before), Contains("which a merge must not touch"), bench, 2);
  refused(into(before, bench.base()), Contains("which a merge must not touch"), bench, 2);
  refused(into(before, bench.folder.path()), Contains("which a merge must not touch"), bench, 2);
  refused(run({"merge", before.string(), "--model", (bench.folder / "gone").string(), "--out", bench.out().string()}),
          Contains("gone") && Contains("no such folder"), bench, 2);
  change_tensor(before / "adapter" / "adapter_model.safetensors",
                "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", at::ones({8, 16}));
  refused(merge_run(bench), Contains("model.layers.0.self_attn.q_proj.lora_A.weight: the model needs [8, 32]"), bench,
          2);
  for (const auto& [name, bytes] : kept) {
    if (name.find("adapter_model") == std::string::npos) CHECK(contents(before).at(name) == bytes);
  }
}

TEST_CASE("merge: a write that fails half-way, and a full disk, leave nothing") {
  const Bench bench;
  bench.make_run("lora", {});
  const auto kept = contents(bench.folder / "run");
  const RunResult limited = merge_run(bench, {}, [] {
    const rlimit limit{50'000, 50'000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  });
  refused(limited, Contains("model.safetensors: writing failed: File too large"), bench, 2);

  const fs::path mount = bench.folder / "disk";
  fs::create_directory(mount);
  const auto disk = [&](const char* size) {
    if (::unshare(CLONE_NEWNS) != 0 || ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("tmpfs", mount.c_str(), "tmpfs", 0, size) != 0) {
      ::_exit(99);
    }
  };
  const Words words{"merge", (bench.folder / "run").string(), "--out", (mount / "out").string(), "--shard-size",
                    "20KB"};
  const RunResult before = run(words, [&] { disk("size=64k"); });
  if (before.exit == 99) {
    fmt::print("SKIPPED: mounting a small disk needs root\n");
    return;
  }
  refused(before, Contains("are to be written, but the disk has") && Contains("free some space"), bench, 3);
  // Room for the numbers, but not for all files, whose last pages are never full.
  const RunResult late = run(words, [&] { disk("size=132k"); });
  refused(late, Contains("No space left on device") && Contains("free some space"), bench, 3);
  CHECK(contents(bench.folder / "run") == kept);
}

TEST_CASE("merge: killed at any moment, the output is absent or whole, and the run is as it was") {
  const Bench bench;
  const fs::path before = bench.make_run("lora", {"train_also=embeddings,norms"});
  const auto kept = contents(before);
  const std::string out = bench.out().string();
  for (const bool replaces : {false, true}) {
    for (const std::string moment : {"file:1", "file:2", "file:9", "commit:1", "committed:1"}) {
      INFO(moment << (replaces ? ", over a former one" : ""));
      REQUIRE(killed_at(moment, {"-q", "merge", before.string(), "--out", out, "--shard-size", "2KB", "--force"}));
      REQUIRE(fs::exists(out) == (replaces || moment == "committed:1"));
      if (!fs::exists(out)) continue;
      CHECK(run({"inspect", out}).exit == 0);
      CHECK(fs::exists(bench.out() / "tapetune_provenance.json"));
      CHECK(fs::exists(bench.out() / "tokenizer.json"));
    }
  }
  CHECK(contents(before) == kept);
  CHECK(merge_run(bench, {"--force"}).exit == 0);
  // The last one cleared what the killed ones left: base, run and out.
  CHECK(std::distance(fs::directory_iterator(bench.folder.path()), fs::directory_iterator()) == 3);
}

}  // namespace merge_safety_test
