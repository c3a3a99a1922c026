// What earlier versions of tapetune wrote is read to the same numbers (tests/data/pins, see its README.md), and what a
// seed draws stays the same: names and order of parameters, starting values, dropout.
#include <algorithm>

#include "adapters/build_model.h"
#include "catch.h"
#include "checkpoint/writer.h"
#include "core/json.h"
#include "model/loss.h"
#include "support.h"

namespace pins_test {

using namespace tapetune;
using namespace tapetune::test;
namespace fs = std::filesystem;

namespace {

// A version's folder as it was when it was made: run folders beside the model "m" that they name.
struct Version {
  explicit Version(const std::string& name) {
    for (const auto& entry : fs::directory_iterator(data("pins/" + name))) {
      fs::copy(entry.path(), home / entry.path().filename().string(), fs::copy_options::recursive);
    }
    tiny_checkpoint(home / "m");
    expected = load_tensors(home / "expected.safetensors");
  }
  std::string at(const std::string& name) const { return (home / name).string(); }

  void check_logits(const std::string& name, std::vector<std::string> model) const {
    std::string tokens;
    for (int i = 0; i < 40; ++i) tokens += fmt::format("{}{}", i == 0 ? "" : ",", 3 + 7 * i % 50);
    model.insert(model.begin(), "logits");
    for (const std::string word : {"--tokens", tokens.c_str(), "--dtype", "f64", "--force", "--out"})
      model.push_back(word);
    model.push_back(at("logits"));
    INFO("logits of " << name);
    const RunResult result = run(model);
    INFO(result.err);
    REQUIRE(result.exit == 0);
    const at::Tensor golden = expected.at("logits." + name);
    CHECK(largest_difference(load_tensors(at("logits")).at("logits"), golden) <=
          1e-6 * golden.abs().max().item<double>());
  }

  // To a unit in the last place: the sums of a product may have another order on another processor.
  void check_merge(const std::string& name, std::vector<std::string> model) const {
    fs::remove_all(at("merge"));
    model.insert(model.begin(), "merge");
    for (const std::string word : {"--out", at("merge").c_str()}) model.push_back(word);
    INFO("merge of " << name);
    const RunResult result = run(model);
    INFO(result.err);
    REQUIRE(result.exit == 0);
    const auto merged = load_tensors(fs::path(at("merge")) / "model.safetensors");
    const std::string prefix = "merged." + name + ".";
    int seen = 0;
    for (const auto& [key, golden] : expected) {
      if (!key.starts_with(prefix)) continue;
      const std::string tensor = key.substr(prefix.size());
      INFO(tensor);
      const at::Tensor found = merged.at(tensor);
      const at::Tensor next = at::nextafter(golden, at::full_like(golden, INFINITY)),
                       last = at::nextafter(golden, at::full_like(golden, -INFINITY));
      CHECK(at::logical_and(found >= last, found <= next).all().item<bool>());
      ++seen;
    }
    CHECK(seen > 0);
  }

  // The base has windows now, in an architecture that takes its biases: what an earlier version read as a Mistral.
  void give_windows(std::int64_t window) const {
    Json config = from_text(read_file(at("m/config.json")));
    config["architectures"] = {"SmolLM3ForCausalLM"};
    config["model_type"] = "smollm3";
    config["no_rope_layers"] = {1, 1};
    config["layer_types"] = {"sliding_attention", "sliding_attention"};
    config["use_sliding_window"] = true;
    config["sliding_window"] = window;
    write_file(at("m/config.json"), to_text(config));
  }

  TempFolder home;
  std::map<std::string, at::Tensor> expected;
};

std::vector<std::string> versions() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(data("pins"))) {
    if (entry.is_directory()) names.push_back(entry.path().filename().string());
  }
  std::ranges::sort(names);
  return names;
}

struct Start {
  std::string name;
  std::string method;
  std::vector<std::string> words;
};

const std::vector<Start>& starts() {
  static const std::vector<Start> all{
      {"full", "full", {}},
      {"lora", "lora", {"rank=2", "targets=q,k,v,o,gate,up,down,lm_head", "dora=true", "train_also=embeddings,norms"}},
      {"longlora", "longlora", {"rank=2", "targets=q,v", "train_also=norms"}},
      {"theta-scaling", "theta-scaling", {"rank=2", "layers_to_transform=1"}},
      {"tape", "tape", {"width=2", "train_also=lm_head"}},
      {"tape-lora", "tape", {"rank=2", "mix=per-head", "equivariant=false"}},
  };
  return all;
}

// Under "METHOD/NUMBER/NAME", so that the order counts.
std::map<std::string, at::Tensor> starting_values() {
  std::map<std::string, at::Tensor> all;
  const ModelConfig config = random_config(false);
  for (const Start& start : starts()) {
    const AdaptedModel adapted =
        adapt(config, random_weights(config, at::kFloat), parse_method(start.method, start.words), at::kFloat, 3);
    int number = 0;
    for (const Parameter& parameter : adapted.parameters) {
      // Of those that are copies of the base's weights the name is enough.
      const bool drawn =
          parameter.name.find("lora_") != std::string::npos || parameter.name.find("pe.") != std::string::npos;
      const at::Tensor value = parameter.value.detach();
      all[fmt::format("{}/{:03}/{}", start.name, number++, parameter.name)] =
          drawn ? value.clone() : at::zeros({1}, at::kFloat);
    }
  }
  return all;
}

// What dropout gives for two sequences, with and without recomputation.
std::map<std::string, at::Tensor> dropped_losses() {
  std::map<std::string, at::Tensor> all;
  const ModelConfig config = random_config(false);
  const at::Tensor tokens = at::arange(3, 27, at::kLong).view({2, 12});
  for (const std::string method : {"lora", "theta-scaling", "tape"}) {
    const AdaptedModel adapted = adapt(
        config, random_weights(config, at::kFloat),
        parse_method(method, std::vector<std::string>{"rank=4", "dropout=0.5", "targets=q,k,v,o,gate,up,down,lm_head"}),
        at::kFloat, 3);
    {
      const c10::NoGradGuard setting;  // B starts at zero, where dropout shows nowhere
      for (const Parameter& parameter : adapted.parameters) {
        if (parameter.name.find("lora_B") != std::string::npos) parameter.value.fill_(0.05);
      }
    }
    for (const Checkpointing checkpointing : {Checkpointing::off, Checkpointing::full}) {
      ForwardInput in;
      in.tokens = tokens;
      in.training.emplace();
      in.training->seed = 11;
      in.training->first_sequence = 5;
      in.training->checkpointing = checkpointing;
      const Training head = *in.training;
      const ForwardOutput out = adapted.model.forward(in);
      all[fmt::format("{}/{}", method, checkpointing == Checkpointing::off ? "off" : "full")] =
          adapted.model.logits(out.last.flatten(0, 1), &head).detach().mean(0);  // [vocab]
    }
  }
  return all;
}

}  // namespace

TEST_CASE("runs, adapters and merged models of earlier versions give the same numbers") {
  REQUIRE(versions().size() == 2);
  for (const std::string& name : versions()) {
    INFO(name);
    const Version version(name);
    for (const std::string method : {"full", "lora", "longlora", "theta-scaling", "tape", "tape-lora"}) {
      const std::string adapter = version.at("adapters/" + method);
      version.check_logits(method, {version.at("m"), "--adapter", adapter});
      if (method != "full") version.check_merge(method, {adapter, "--model", version.at("m")});
    }
    for (const std::string folder : {"finished", "killed"}) {
      version.check_logits(folder, {version.at(folder)});
    }
    version.check_merge("tape-lora", {version.at("finished")});
    version.check_merge("killed", {version.at("killed")});
    version.check_logits("merged-tape", {version.at("merged-tape")});
    version.check_logits("peft", {version.at("m"), "--adapter", version.at("peft")});
    version.check_merge("peft", {version.at("peft"), "--model", version.at("m")});
  }
}

TEST_CASE("a run that an earlier version was killed in is resumed to the same parameters") {
  for (const std::string& name : versions()) {
    INFO(name);
    const Version version(name);
    const auto steps = version.expected.at("resumed_steps").item<std::int64_t>();
    const RunResult result = run({"train", version.at("killed"), fmt::format("steps={}", steps)});
    INFO(result.err);
    REQUIRE(result.exit == 0);
    const auto found = load_tensors(fs::path(version.at("killed")) / "adapter/adapter_model.safetensors");
    int seen = 0;
    for (const auto& [key, golden] : version.expected) {
      if (!key.starts_with("resumed.")) continue;
      INFO(key);
      // Four steps of AdamW magnify what a sum's order changes.
      CHECK(largest_difference(found.at(key.substr(8)), golden) <= 1e-4);
      ++seen;
    }
    CHECK(seen == static_cast<int>(found.size()));
  }
}

TEST_CASE("a run of an earlier version goes on without the model's windows, as it was trained, and says so") {
  const std::string said = "the model's sliding window of 4 tokens is off (attention.window: none): attention is full";
  for (const std::string& name : versions()) {
    INFO(name);
    const Version version(name);
    version.give_windows(4);
    for (const std::string method : {"lora", "longlora", "tape-lora"}) {
      version.check_logits(method, {version.at("m"), "--adapter", version.at("adapters/" + method)});
    }
    for (const std::string folder : {"finished", "killed"}) version.check_logits(folder, {version.at(folder)});
    CHECK_THAT(run({"logits", version.at("killed"), "--tokens", "3,4", "--out", version.at("note")}).err,
               Contains(said));
    // Merged, it must not be given a window by whoever reads its config.
    for (const bool plain : {true, false}) {
      version.check_merge(plain ? "lora" : "killed",
                          plain ? std::vector{version.at("adapters/lora"), std::string("--model"), version.at("m")}
                                : std::vector{version.at("killed")});
      const std::string config = read_file(version.at("merge/config.json"));
      CHECK(parse_config(config, "config.json").longest_window() == 0);
      CHECK(from_text(config).value("use_sliding_window", false) == false);
      CHECK_FALSE(from_text(config).contains("attention_windows"));
    }

    const auto steps = version.expected.at("resumed_steps").item<std::int64_t>();
    const RunResult result = run({"train", version.at("killed"), fmt::format("steps={}", steps)});
    INFO(result.err);
    REQUIRE(result.exit == 0);
    CHECK_THAT(result.err, Contains(said));
    const auto found = load_tensors(fs::path(version.at("killed")) / "adapter/adapter_model.safetensors");
    for (const auto& [key, golden] : version.expected) {
      if (key.starts_with("resumed.")) CHECK(largest_difference(found.at(key.substr(8)), golden) <= 1e-4);
    }
    CHECK_THAT(run({"logits", version.at("killed"), "--tokens", "3,4", "--out", version.at("note"), "--force"}).err,
               Contains(said));
  }
}

TEST_CASE("parameters keep their names, their order and their starting values") {
  const auto expected = load_tensors(data("pins/starts.safetensors"));
  const auto found = starting_values();
  std::vector<std::string> names, golden;
  for (const auto& [name, value] : found) names.push_back(name);
  for (const auto& [name, value] : expected) golden.push_back(name);
  CHECK(names == golden);
  for (const auto& [name, value] : expected) {
    INFO(name);
    REQUIRE(found.contains(name));
    // ATen draws normal numbers with vector instructions where it has them, which changes last digits.
    CHECK(largest_difference(found.at(name), value) <= 1e-6);
  }
}

TEST_CASE("dropout draws the same numbers as before") {
  const auto found = dropped_losses();
  for (const auto& [name, golden] : load_tensors(data("pins/dropout.safetensors"))) {
    INFO(name);
    CHECK(largest_difference(found.at(name), golden) <= 1e-5);
  }
  CHECK(largest_difference(found.at("lora/off"), found.at("lora/full")) <= 1e-6);
}

// Not run by itself; run as `tapetune_tests "[.pins]"` in the version whose draws are to be kept.
TEST_CASE("writes starts.safetensors and dropout.safetensors of tests/data/pins", "[.pins]") {
  save_safetensors(data("pins/starts.safetensors"), starting_values(), true);
  save_safetensors(data("pins/dropout.safetensors"), dropped_losses(), true);
}

}  // namespace pins_test
