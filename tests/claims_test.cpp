// Every tensor of a checkpoint has an owner: what nothing reads, and position encodings that tapetune does not have,
// are refused, because without them another model would be computed.
#include <c10/core/InferenceMode.h>

#include "adapters/checkpoints.h"
#include "adapters/peft.h"
#include "catch.h"
#include "checkpoint/writer.h"
#include "model/loss.h"
#include "support.h"

namespace claims_test {

using namespace tapetune;
using namespace tapetune::test;
namespace fs = std::filesystem;

namespace {

void add_tensors(const fs::path& folder, const std::map<std::string, at::Tensor>& added) {
  std::map<std::string, at::Tensor> all = load_tensors(folder / "model.safetensors");
  for (auto& [name, value] : all) value = value.clone();  // the file that they are mapped from goes
  all.insert(added.begin(), added.end());
  save_safetensors(folder / "model.safetensors", all, true, {{"format", "pt"}});
}

struct Model : TinyModel {
  void add(const std::string& name, const at::Tensor& tensor) const { add_tensors(path(), {{name, tensor}}); }
  void position(const std::string& json) const {
    Json config = from_text(read_file(*this / "config.json"));
    config["position"] = from_text(json);
    write_file(*this / "config.json", to_text(config));
  }
  // TAPE's tensors as a merge writes them.
  fs::path merged_tape() const {
    const fs::path adapter = folder / "adapter", merged = folder / "merged";
    REQUIRE(run({"adapter", path(), "--method", "tape", "--out", adapter.string()}).exit == 0);
    REQUIRE(run({"merge", adapter.string(), "--model", path(), "--out", merged.string()}).exit == 0);
    return merged;
  }
};

// Every command that reads weights must refuse alike, in one line, and write nothing.
void refused_by_all(const Model& model, const std::vector<std::string>& words) {
  const std::string out = model.out(), model_word = "model=" + model.path();
  write_file(model.folder / "text.txt", "some text");
  const std::vector<std::string> settings{"context=8", "steps=1",    "adapter=lora",
                                          model_word,  "run=" + out, "data=" + (model.folder / "text.txt").string()};
  write_file(model.folder / "recipe.yaml", "batch: 1\n");
  std::vector<std::string> train{"train", (model.folder / "recipe.yaml").string()};
  train.insert(train.end(), settings.begin(), settings.end());
  const std::vector<std::vector<std::string>> commands{
      {"inspect", model.path()},
      {"logits", model.path(), "--tokens", "1,2", "--out", out},
      {"generate", model.path(), "--tokens", "1,2"},
      {"convert", model.path(), "--out", out},
      {"export", model.path(), "--gguf", "f32", "--out", out},
      {"merge", model.path(), "--out", out},
      {"adapter", model.path(), "--method", "lora", "--out", out},
      train,
  };
  for (const std::vector<std::string>& command : commands) {
    INFO(command.front());
    const RunResult result = run(command);
    CHECK(result.exit == 1);
    INFO(result.err);
    CHECK(result.err.rfind("error: [", 0) == 0);
    for (const std::string& word : words) CHECK_THAT(result.err, Contains(word));
    CHECK_FALSE(fs::exists(out));
  }
}

}  // namespace

TEST_CASE("a tensor that nothing reads is refused by every command") {
  const Model model;
  model.add("model.layers.1.self_attn.rotary_emb.c", at::ones({1}));
  model.add("model.layers.0.self_attn.sinks", at::ones({4}));
  refused_by_all(model, {"tensor model.layers.0.self_attn.sinks (and 1 more) is not part of a LlamaForCausalLM"});
}

TEST_CASE("a bias that config.json denies is a tensor that nothing reads") {
  const Model model;
  Json config = from_text(read_file(model / "config.json"));
  config["mlp_bias"] = false;
  write_file(model / "config.json", to_text(config));
  refused_by_all(model, {"model.layers.0.mlp.down_proj.bias (and 5 more) is not part of"});
}

TEST_CASE("tables that older versions of transformers stored are known") {
  const Model plain, stored;
  const auto logits = [](const Model& model) {
    REQUIRE(run({"logits", model.path(), "--tokens", "1,2,3", "--out", model.out()}).exit == 0);
    return read_file(model.out());
  };
  stored.add("model.layers.0.self_attn.rotary_emb.inv_freq", at::full({8}, 123.0));
  stored.add("model.rotary_emb.inv_freq", at::full({8}, 123.0));
  stored.add("model.layers.1.self_attn.rotary_emb.cos_cached", at::full({1, 1, 48, 16}, 123.0));
  CHECK(logits(stored) == logits(plain));
  CHECK(run({"convert", stored.path(), "--out", (stored.folder / "converted").string()}).exit == 0);
  CHECK_FALSE(open_checkpoint(stored.folder / "converted").has("model.rotary_emb.inv_freq"));
}

TEST_CASE("a position encoding that tapetune does not have is refused by name") {
  const Model model;
  model.position(R"({"type": "fire", "width": 32})");
  refused_by_all(model, {"config.json: position.type \"fire\" is not supported; supported: rope, nope, alibi, tape."});
  const RunResult planned = run({"plan", (model.folder / "recipe.yaml").string(), "context=8", "steps=1",
                                 "adapter=lora", "model=" + model.path(), "data=x.tokens", "run=x"});
  CHECK(planned.exit == 1);
  CHECK_THAT(planned.err, Contains("position.type \"fire\" is not supported"));
}

TEST_CASE("config.json's position must be an object with a type") {
  const Model model;
  const auto error = [&] { return error_of([&] { open_checkpoint(model.path()); }); };
  model.position(R"("rope")");
  CHECK_THAT(error(), Contains("position must be an object, but is \"rope\""));
  model.position(R"({"width": 3})");
  CHECK_THAT(error(), Contains("position.type is missing; it names the position encoding"));
  model.position(R"({"type": 7})");
  CHECK_THAT(error(), Contains("position.type"));
  model.position(R"({"type": "rope", "scale": 2})");
  CHECK_THAT(error(), Contains("position takes no options for rope, but is {\"type\":\"rope\",\"scale\":2}"));
  model.position(R"({"type": "rope"})");
  CHECK(error() == "no error");
}

TEST_CASE("a merged TAPE says in config.json what its position encoding is, and needs its tensors") {
  const Model model;
  const fs::path merged = model.merged_tape(), file = merged / "config.json";
  Json config = from_text(read_file(file));
  CHECK(config["position"] == from_text(R"({"type": "tape", "mix": "full", "I": 16})"));
  CHECK(open_checkpoint(merged).config().position == "tape");
  CHECK(run({"merge", merged.string(), "--out", (model.folder / "again").string()}).exit == 0);
  CHECK(from_text(read_file(model.folder / "again" / "config.json"))["position"] == config["position"]);

  // One of an earlier version, whose tensors alone say it.
  config.erase("position");
  write_file(file, to_text(config));
  CHECK(open_checkpoint(merged).config().position == "tape");

  // As RoPE, its tensors would be ignored.
  config["position"] = {{"type", "rope"}};
  write_file(file, to_text(config));
  CHECK_THAT(error_of([&] { open_checkpoint(merged); }),
             Contains("model.layers.0.pe.down_proj.weight (and 7 more) is not part of"));

  const auto error_with = [&](const char* position) {
    config["position"] = from_text(position);
    write_file(file, to_text(config));
    return run({"logits", merged.string(), "--tokens", "1,2", "--out", model.out(), "--force"}).err;
  };
  CHECK_THAT(error_with(R"({"type": "tape", "I": 8})"),
             Contains("position.I is 8, but model.layers.0.pe.up_proj.weight has 16 rows"));
  CHECK_THAT(error_with(R"({"type": "tape", "mix": 3})"), Contains("position.mix must be full or per-head"));
  CHECK_THAT(error_with(R"({"type": "tape", "mix": "half"})"),
             Contains("mix cannot be \"half\"; it takes full, per-head"));
  CHECK_THAT(error_with(R"({"type": "tape", "factor": 2})"), Contains("position.factor is not supported"));
  CHECK(error_with(R"({"type": "tape", "I": 16.0})").empty());

  Model plain;
  plain.position(R"({"type": "tape"})");
  const RunResult result = run({"logits", plain.path(), "--tokens", "1,2", "--out", plain.out()});
  CHECK(result.exit == 1);
  CHECK_THAT(result.err, Contains("model.layers.0.pe.up_proj.weight is missing"));
}

TEST_CASE("an ablation's tensors are not taken for TAPE's") {
  const Model model;
  const fs::path merged = model.merged_tape();
  // There are two layers, 0 and 1.
  add_tensors(merged, {{"model.layers.0.pe.up_projs.1.weight", at::ones({16, 2})},
                       {"model.layers.2.pe.up_proj.weight", at::ones({16, 2})}});
  CHECK_THAT(error_of([&] { open_checkpoint(merged); }),
             Contains("model.layers.0.pe.up_projs.1.weight (and 1 more) is not part of"));
}

TEST_CASE("the lab's folders: RoPE and TAPE are computed, the others refused by name") {
  const fs::path lab = shared("golden/lab");
  if (lab.empty()) return;
  const c10::InferenceMode inference;
  for (const std::string name : {"rope", "tape-full", "tape-per-head"}) {
    INFO(name);
    const Checkpoint checkpoint = open_checkpoint(lab / name);
    auto expected = load_tensors(lab / name / "expected.safetensors");
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
      const Llama model = open_adapted(checkpoint, map_weights(checkpoint), dtype).model;
      ForwardInput in;
      in.tokens = expected.at("input_ids");
      const at::Tensor logits = model.logits(model.forward(in).last), golden = expected.at("logits");
      const double largest = golden.abs().max().item<double>();
      CHECK(largest_difference(logits.to(at::kDouble), golden) <= (dtype == at::kFloat ? 3e-6 : 1e-6) * largest);
    }
  }
  const std::vector<std::string> types{"randpe",           "fire",       "xpos",       "t5",
                                       "tape-attention",   "tape-dense", "tape-split", "tape-vector",
                                       "tape-feedforward", "tape-yarn"};
  for (const std::string& type : types) {
    CHECK_THAT(error_of([&] { open_checkpoint(lab / type); }),
               Contains("position.type \"" + type + "\" is not supported"));
  }
}

}  // namespace claims_test
