// A program with an adapter of its own (examples/own-method): it does with it all that tapetune does with its own, and
// tapetune itself refuses what it does not know. adapters_test.cpp and merge_test.cpp go through this adapter as well.
#include "adapters/component.h"
#include "adapters/peft.h"
#include "catch.h"
#include "checkpoint/writer.h"
#include "export/merge.h"
#include "support.h"

namespace own_method_test {

using namespace tapetune;
using namespace tapetune::test;
namespace fs = std::filesystem;

namespace {

// A tiny model, tokens and a recipe that trains IA3 for four steps.
struct Setup {
  Setup() {
    tiny_tokens(model, folder("data.tokens"), 4000);
    write_file(recipe(), fmt::format("model: {}\ndata: {}\ncontext: 16\nadapter: {{type: ia3, targets: [k, v, down]}}\n"
                                     "steps: 4\nbatch: 4\nmicro_batch: 1\noptimizer: {{lr: 5.0e-2}}\nsave_every: 2\n"
                                     "dtype: f32\ncheckpointing: full\n",
                                     model.path(), folder("data.tokens").string()));
  }
  fs::path folder(const std::string& name) const { return model.folder / name; }
  std::string recipe() const { return folder("recipe.yaml").string(); }
  std::vector<std::string> words(const std::string& name, std::vector<std::string> more = {}) const {
    more.insert(more.begin(), {"train", recipe(), "run=" + folder(name).string()});
    return more;
  }
  void train(const std::string& name, const std::vector<std::string>& more = {}) const { does(words(name, more)); }
  // Our program succeeds; what it says on stdout.
  static std::string does(const std::vector<std::string>& words) {
    const RunResult result = run(words, {}, own_method_binary);
    INFO(fmt::format("{}", fmt::join(words, " ")) << "\n" << result.err);
    REQUIRE(result.exit == 0);
    return result.out;
  }
  TinyModel model;
};

// tapetune itself does not have this adapter.
void refused(const std::vector<std::string>& words, const fs::path& out) {
  const RunResult result = run(words);
  INFO(fmt::format("{}", fmt::join(words, " ")));
  CHECK(result.exit == 1);
  CHECK_THAT(result.err, Contains("there is no adapter \"ia3\"; there are none, lora; if another program brings it, "));
  CHECK(result.err.rfind("error: [", 0) == 0);
  CHECK(lines_of(result.err).size() == 1);
  CHECK_FALSE(fs::exists(out));
}

at::Tensor logits_of(const AdaptedModel& adapted) {
  const c10::NoGradGuard evaluation;
  ForwardInput in;
  in.tokens = (at::arange(40) * 11 + 5).remainder(61).unsqueeze(0);
  return adapted.model.logits(adapted.model.forward(in).last);
}

AdapterComponent component(std::string_view name, const Key& key) {
  AdapterComponent made = *adapter_components().get("none");
  made.name = name;
  made.keys = {key};
  return made;
}

}  // namespace

TEST_CASE("own method: a run that is killed and resumed gives the bytes of an undisturbed one") {
  const Setup setup;
  setup.train("whole");
  REQUIRE(killed_at("step:3", setup.words("killed"), own_method_binary));
  REQUIRE(fs::exists(setup.folder("killed") / "checkpoints" / "step-00000002"));
  REQUIRE_FALSE(fs::exists(setup.folder("killed") / "adapter"));
  setup.train("killed");
  CHECK(contents(setup.folder("killed") / "adapter") == contents(setup.folder("whole") / "adapter"));
  CHECK(untimed_metrics(setup.folder("killed")) == untimed_metrics(setup.folder("whole")));
  // Nothing stayed at one, where it starts.
  const auto trained = load_tensors(setup.folder("whole") / "adapter" / "adapter_model.safetensors");
  CHECK(trained.size() ==
        3 * static_cast<std::size_t>(parse_config(read_file(setup.model / "config.json"), "config.json").layers));
  for (const auto& [name, value] : trained) {
    INFO(name);
    CHECK(largest_difference(value, at::ones_like(value)) > 0.01);
  }
}

TEST_CASE("own method: several ranks, a sharded base and sequence parallel train what one rank does") {
  const Setup setup;
  setup.train("alone");
  const auto expected = load_tensors(setup.folder("alone") / "adapter" / "adapter_model.safetensors");
  const std::vector<std::vector<std::string>> layouts{
      {}, {"shard=base", "checkpointing=selective"}, {"sequence_parallel=2"}, {"checkpointing=off"}};
  for (std::size_t i = 0; i < layouts.size(); ++i) {
    INFO(fmt::format("{}", fmt::join(layouts[i], " ")));
    const std::string name = fmt::format("run{}", i);
    std::vector<std::string> words = setup.words(name, layouts[i]);
    words.insert(words.begin(), {"launch", "--nproc", "2", "--"});
    Setup::does(words);
    for (const auto& [tensor, value] : load_tensors(setup.folder(name) / "adapter" / "adapter_model.safetensors")) {
      INFO(tensor);
      CHECK(largest_difference(value, expected.at(tensor)) < 1e-4);
    }
  }
}

TEST_CASE("own method: every command knows the adapter, and tapetune runs the merged model") {
  const Setup setup;
  CHECK_THAT(Setup::does({"plan", setup.recipe(), "run=" + setup.model.out()}), Contains("scales"));
  CHECK_THAT(Setup::does({"recipes", "keys"}), Contains("ia3"));
  setup.train("run");
  const std::string run_ = setup.folder("run").string(), merged = setup.folder("merged").string(),
                    tokens = "1,7,30,4,4";
  CHECK_THAT(Setup::does({"inspect", setup.model.path(), "--adapter", run_ + "/adapter"}), Contains("ia3"));
  Setup::does({"verify", run_});
  Setup::does({"generate", run_, "--tokens", tokens, "--max-new-tokens", "4"});
  Setup::does({"logits", run_, "--tokens", tokens, "--out", setup.folder("own").string()});
  Setup::does({"merge", run_, "--out", merged});
  REQUIRE(run({"logits", merged, "--tokens", tokens, "--out", setup.folder("plain").string()}).exit == 0);
  REQUIRE(run({"logits", setup.model.path(), "--tokens", tokens, "--out", setup.folder("base").string()}).exit == 0);
  const at::Tensor own = load_tensors(setup.folder("own")).at("logits");
  CHECK(largest_difference(load_tensors(setup.folder("plain")).at("logits"), own) < 1e-5);
  CHECK(largest_difference(load_tensors(setup.folder("base")).at("logits"), own) > 1e-2);
}

TEST_CASE("own method: tapetune refuses recipe, run and adapter in one line that names the adapter") {
  const Setup setup;
  setup.train("run");
  const std::string run_ = setup.folder("run").string(), out = setup.model.out(), model = setup.model.path();
  refused(setup.words("out"), out);
  refused({"train", run_, "steps=6", "run=" + out}, out);
  refused({"plan", setup.recipe(), "run=" + out}, out);
  refused({"logits", run_, "--tokens", "1,2", "--out", out}, out);
  refused({"logits", run_ + "/checkpoints/step-00000004", "--tokens", "1,2", "--out", out}, out);
  refused({"logits", model, "--adapter", run_ + "/adapter", "--tokens", "1,2", "--out", out}, out);
  refused({"inspect", model, "--adapter", run_ + "/adapter"}, out);
  refused({"inspect", model, "--method", "none", "adapter.type=ia3"}, out);
  refused({"merge", run_, "--out", out}, out);
  refused({"merge", run_ + "/adapter", "--model", model, "--out", out}, out);
}

TEST_CASE("own method: merging scales rows, columns and biases as the adapter does") {
  ModelConfig config = random_config(false);
  config.qkv_bias = config.output_bias = config.mlp_bias = true;
  const TempFolder folder;
  const LlamaWeights weights = test::random_weights(config, at::kFloat);
  std::map<std::string, at::Tensor> base;
  std::vector<PlannedTensor> plan;
  for (const auto& [name, tensor] : named_weights(config, weights)) {
    base[name] = tensor;
    plan.push_back({name, at::kFloat, tensor.sizes().vec()});
  }
  write_checkpoint(folder / "base", config, plan, [&](const std::string& name) { return base.at(name); });
  const std::vector<std::string> words{"adapter.type=ia3", "adapter.targets=k,v,o,gate,down", "train_also=norms"};
  const AdaptedModel adapted = adapt(config, weights, parse_method("none", words), at::kDouble);
  {
    const c10::NoGradGuard moving;
    at::manual_seed(5);
    for (const Parameter& p : adapted.parameters) p.value.add_(at::randn(p.value.sizes()).to(at::kFloat) * 0.3);
  }
  save_adapter(adapted, folder / "adapter", folder / "base", false);
  MergeOptions options;
  options.out = folder / "merged";
  merge(open_merge(folder / "adapter", folder / "base"), options);

  const Checkpoint merged = Checkpoint::open(folder / "merged");
  const AdaptedModel plain = adapt(merged.config(), map_weights(merged), {}, at::kDouble),
                     untrained = adapt(config, weights, {}, at::kDouble);
  CHECK(largest_difference(logits_of(plain), logits_of(adapted)) < 1e-5);
  CHECK(largest_difference(logits_of(untrained), logits_of(adapted)) > 0.5);
  const auto is_changed = [&](const std::string& module) {
    const std::string name = "model.layers.1." + module;
    return !at::equal(merged.tensor(name), base.at(name));
  };
  CHECK(is_changed("self_attn.k_proj.bias"));
  CHECK(is_changed("mlp.gate_proj.bias"));
  CHECK(is_changed("mlp.down_proj.weight"));
  CHECK_FALSE(is_changed("mlp.down_proj.bias"));  // which is added after what was scaled
  CHECK_FALSE(is_changed("self_attn.q_proj.weight"));
}

TEST_CASE("own method: a component may not take a name, nor give a known key another type") {
  auto& all = adapter_components();
  const std::size_t before = all.all().size();
  const Key own{"strength", "how much", Key::Type::number, 1.0, 0, 2, "a number from 0 to 2"};
  CHECK_THAT(error_of([&] { all.add(component("lora", own)); }),
             Contains("there is already adapter \"lora\"; choose another name."));
  Key rank{"rank", "names of ranks", Key::Type::words};
  CHECK_THAT(error_of([&] { all.add(component("ranks", rank)); }),
             Contains("adapter \"ranks\": key rank is of another type than that of \"lora\"; choose another name."));
  AdapterComponent unmade = component("unmade", own);
  unmade.make = nullptr;
  CHECK_THAT(error_of([&] { all.add(unmade); }), Contains("adapter \"unmade\" has no make; set it."));
  CHECK(all.all().size() == before);
}

}  // namespace own_method_test
