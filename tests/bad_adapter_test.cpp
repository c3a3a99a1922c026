// Methods and adapters that cannot be: exit 1, one line with the rule, the value and the remedy, nothing written.
#include "adapters/peft.h"
#include "catch.h"
#include "checkpoint/writer.h"
#include "core/json.h"
#include "support.h"

namespace bad_adapter_test {

using namespace tapetune;
using namespace tapetune::test;
namespace fs = std::filesystem;

namespace {

// The model with these words, and what must be in the one line about them.
void refused(const TinyModel& model, const std::vector<std::string>& words, const std::string& part) {
  std::vector<std::string> all{"logits", model.path(), "--tokens", "1,2,3,4", "--out", model.out()};
  all.insert(all.end(), words.begin(), words.end());
  const RunResult result = run(all);
  INFO(result.err);
  CHECK(result.exit == 1);
  CHECK(result.out.empty());
  CHECK_THAT(result.err, Contains(part));
  CHECK(std::count(result.err.begin(), result.err.end(), '\n') == 1);
  CHECK(result.err.rfind("error: [", 0) == 0);
  CHECK_FALSE(fs::exists(model.out()));
}

std::string adapter(const TinyModel& model, const std::vector<std::string>& method) {
  const std::string folder = (model.folder / "adapter").string();
  std::vector<std::string> words{"adapter", model.path(), "--out", folder, "--force", "--method"};
  words.insert(words.end(), method.begin(), method.end());
  const RunResult result = run(words);
  INFO(result.err);
  CHECK(result.exit == 0);
  return folder;
}

// The adapter's tensors changed.
void change(const std::string& folder, const std::function<void(std::map<std::string, at::Tensor>&)>& how) {
  const fs::path file = fs::path(folder) / "adapter_model.safetensors";
  auto tensors = load_tensors(file);
  for (auto& [name, tensor] : tensors) tensor = tensor.clone();
  how(tensors);
  save_safetensors(file, tensors, true, {{"format", "pt"}});
}

constexpr const char* first_a = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight";

}  // namespace

TEST_CASE("bad method: an unknown one suggests the nearest") {
  const TinyModel model;
  refused(model, {"--method", "longlra"}, R"(there is no method "longlra"; there are none, full, lora, longlora)");
  refused(model, {"--method", "longlra"}, "did you mean longlora?");
  refused(model, {"--method", "tpae"}, "did you mean tape?");
}

TEST_CASE("bad method: settings that it does not have, or values that they cannot take") {
  const TinyModel model;
  refused(model, {"--method", "lora", "rank=0"}, R"(rank must be an integer >= 1, but is "0")");
  refused(model, {"--method", "lora", "rank=-3"}, R"(but is "-3")");
  refused(model, {"--method", "lora", "rank=8x"}, R"(but is "8x")");
  refused(model, {"--method", "lora", "alpha=0"}, "alpha must be a number above 0");
  refused(model, {"--method", "lora", "dropout=1"}, "dropout must be a number from 0 to below 1");
  refused(model, {"--method", "lora", "targets=q,kk"},
          R"(targets cannot be "kk"; it takes q, k, v, o, gate, up, down, lm_head)");
  refused(model, {"--method", "lora", "targets="}, "targets is empty");
  refused(model, {"--method", "lora", "rnak=8"}, R"(lora has no setting "rnak")");
  refused(model, {"--method", "lora", "rnak=8"}, "did you mean rank?");
  refused(model, {"--method", "lora", "group=0.5"}, R"(lora has no setting "group")");
  refused(model, {"--method", "lora", "dora=maybe"}, "dora must be true or false");
  refused(model, {"--method", "tape", "mix=head"}, R"(mix cannot be "head"; it takes full, per-head)");
  refused(model, {"--method", "lora", "train_also=embedding"}, "did you mean embeddings?");
  refused(model, {"--method", "lora", "scaling=linear"}, "scaling=linear needs a factor");
  refused(model, {"--method", "lora", "scaling=none", "factor=2"}, "scaling=none takes no factor");
  refused(model, {"--method", "lora", "factor=0.5"}, "factor must be a number from 1 to 1e6");
}

TEST_CASE("bad method: settings that contradict each other") {
  const TinyModel model;
  refused(model, {"--method", "tape", "alpha=32"}, "add rank=8");
  refused(model, {"--method", "lora", "targets=q,lm_head", "train_also=lm_head"},
          "take lm_head out of train_also or targets");
  refused(model, {"--method", "lora", "layers_to_transform=x"}, "layers_to_transform must be a list of layer numbers");
  refused(model, {"--method", "lora", "layers_to_transform=0,2"},
          "layers_to_transform has layer 2, but the model has 2 (0 to 1)");
  refused(model, {"--method", "lora", "exclude_modules=layers.99.self_attn.q_proj"},
          R"(exclude_modules has "layers.99.self_attn.q_proj", which is not among the targets in layers 0 to 1)");
  refused(model, {"--method", "lora", "targets=q,v", "exclude_modules=v_proj,k_proj"},
          R"(exclude_modules has "k_proj")");
  refused(model, {"--method", "lora", "targets=q", "exclude_modules=q_proj"}, "leave no projection with LoRA matrices");
  refused(model, {"--method", "lora", "factor=1e9"}, "factor must be a number from 1 to 1e6");
  refused(model, {"--method", "lora", "theta=1"}, "theta must be a number above 1");
  const RunResult own = run({"adapter", model.path(), "--method", "lora", "--out", model.path(), "--force"});
  CHECK(own.exit == 1);
  CHECK_THAT(own.err, Contains("is the input itself"));
  CHECK(fs::exists(model / "model.safetensors"));
}

TEST_CASE("bad method: groups that do not divide the sequence, heads that cannot be halved") {
  const TinyModel model;
  const auto gradients = [&](const std::vector<std::string>& words, const std::string& tokens,
                             const std::string& part) {
    std::vector<std::string> all{"check", "gradients", model.path(), "--tokens",
                                 tokens,  "--out",     model.out(),  "--method"};
    all.insert(all.end(), words.begin(), words.end());
    const RunResult result = run(all);
    CHECK(result.exit == 1);
    CHECK_THAT(result.err, Contains(part));
    CHECK(std::count(result.err.begin(), result.err.end(), '\n') == 1);
    CHECK_FALSE(fs::exists(model.out()));
  };
  gradients({"longlora"}, "1,2,3,4,5,6,7,8,9,10", "a group of 2.5 tokens does not fit a sequence of 10");
  gradients({"longlora", "group=6"}, "1,2,3,4,5,6,7,8,9,10", "a group of 6 tokens does not fit a sequence of 10");
  gradients({"longlora", "group=5"}, "1,2,3,4,5,6,7,8,9,10", "it must be even and divide the sequence");
  gradients({"none"}, "1,2,3", "method none has no trainable parameters");

  ModelConfig config = random_config(false);
  config.heads = config.kv_heads = 3;
  CHECK_THROWS_WITH(adapt(config, random_weights(config, at::kFloat), parse_method("longlora", {}), at::kFloat),
                    "[method] half of the heads have shifted groups, but the model has 3: an even number is needed.");
}

TEST_CASE("bad adapter: of another model, with the tensor and both shapes") {
  const TinyModel model;
  const std::string folder = adapter(model, {"lora", "rank=4"});
  change(folder, [](auto& tensors) { tensors[first_a] = at::zeros({4, 48}); });
  refused(model, {"--adapter", folder},
          "model.layers.0.self_attn.q_proj.lora_A.weight: the model needs [4, 32], but the file has [4, 48]");
}

TEST_CASE("bad adapter: a missing tensor or one too many is an error") {
  const TinyModel model;
  std::string folder = adapter(model, {"tape"});
  change(folder, [](auto& tensors) { tensors.erase("base_model.model.model.layers.1.pe.up_proj.weight"); });
  refused(model, {"--adapter", folder}, "tensor base_model.model.model.layers.1.pe.up_proj.weight is missing");
  folder = adapter(model, {"lora"});
  change(folder,
         [](auto& tensors) { tensors["base_model.model.model.layers.9.pe.up_proj.weight"] = at::zeros({2, 2}); });
  refused(model, {"--adapter", folder}, "layers.9.pe.up_proj.weight does not belong to this model and method");
}

TEST_CASE("bad adapter: layers without LoRA matrices need a setting that says so") {
  const TinyModel model;
  const std::string folder = adapter(model, {"lora", "layers_to_transform=1"});
  const fs::path config = fs::path(folder) / "adapter_config.json";
  Json json = from_text(read_file(config));
  CHECK(json["layers_to_transform"] == Json::array({1}));
  fs::remove(fs::path(folder) / "tapetune.json");  // as PEFT writes it
  const std::vector<std::string> words{"logits", model.path(), "--adapter", folder, "--tokens", "3", "--out"};
  std::vector<std::string> fine = words;
  fine.push_back((model.folder / "fine").string());
  CHECK(run(fine).exit == 0);
  json["layers_to_transform"] = nullptr;
  write_file(config, to_text(json));
  refused(model, {"--adapter", folder}, "layers.0.self_attn.q_proj.lora_A.weight is missing");
  json["layers_to_transform"] = Json::array({0, 1});
  write_file(config, to_text(json));
  refused(model, {"--adapter", folder}, "layers.0.self_attn.q_proj.lora_A.weight is missing");
}

TEST_CASE("an adapter whose exclude_modules matches nothing still loads") {
  const TinyModel model;
  const std::string folder = adapter(model, {"lora"});
  const fs::path own = fs::path(folder) / "tapetune.json", peft = fs::path(folder) / "adapter_config.json";
  const auto loads = [&] { return run({"inspect", model.path(), "--adapter", folder}).exit == 0; };
  Json json = from_text(read_file(own));
  json["exclude_modules"] = "layers.99.self_attn.q_proj";
  write_file(own, to_text(json));
  CHECK(loads());
  fs::remove(own);  // as PEFT writes it
  json = from_text(read_file(peft));
  json["exclude_modules"] = Json::array({"layers.99.self_attn.q_proj"});
  write_file(peft, to_text(json));
  CHECK(loads());
}

TEST_CASE("bad adapter: folders that are not adapters") {
  const TinyModel model;
  refused(model, {"--adapter", (model.folder / "nowhere").string()}, "no such folder");
  refused(model, {"--adapter", model.path()}, "is a checkpoint whose positions have no tensors, not an adapter");
  fs::create_directory(model.folder / "empty");
  refused(model, {"--adapter", (model.folder / "empty").string()}, "has no adapter_model.safetensors");
  const std::string folder = adapter(model, {"lora"});
  const fs::path config = fs::path(folder) / "adapter_config.json";
  Json json = from_text(read_file(config));
  json["lora_alpha"] = 99;
  write_file(config, to_text(json));
  refused(model, {"--adapter", folder}, "says lora_alpha = 99, but tapetune.json has 16.0");
  fs::remove(fs::path(folder) / "tapetune.json");
  json["init_lora_weights"] = "pissa_niter_4";
  write_file(config, to_text(json));
  refused(model, {"--adapter", folder},
          "init_lora_weights = \"pissa_niter_4\" is not supported; load it with PEFT, save model.merge_and_unload()");
  json["init_lora_weights"] = true;
  json["rank_pattern"] = {{"q_proj", 4}};
  write_file(config, to_text(json));
  refused(model, {"--adapter", folder}, "rank_pattern = {\"q_proj\":4} is not supported");
  json["rank_pattern"] = Json::object();
  json["peft_type"] = "IA3";
  write_file(config, to_text(json));
  refused(model, {"--adapter", folder}, "peft_type IA3 is not supported, only LORA; load it with PEFT");
  write_file(config, "{");
  refused(model, {"--adapter", folder}, "adapter_config.json");
  fs::rename(fs::path(folder) / "adapter_model.safetensors", fs::path(folder) / "adapter_model.bin");
  refused(model, {"--adapter", folder}, "a Python pickle: load it with PEFT and save it again");
  CHECK(run({"adapter", model.path(), "--method", "none", "--out", model.out()}).exit == 1);
  CHECK_FALSE(fs::exists(model.out()));
}

}  // namespace bad_adapter_test
