// What tests of merging share: a base model with runs whose trained numbers are drawn, and the command.
#pragma once

#include <c10/core/InferenceMode.h>

#include "adapters/checkpoints.h"
#include "adapters/peft.h"
#include "catch.h"
#include "export/merge.h"
#include "run/open.h"
#include "support.h"

namespace tapetune::test::merging {

namespace fs = std::filesystem;

using Words = std::vector<std::string>;

// A base model, and runs on it whose trained numbers are drawn.
struct Bench {
  explicit Bench(bool tied = false, at::ScalarType dtype = at::kFloat) {
    const ModelConfig config = random_config(tied);
    std::map<std::string, at::Tensor> tensors;
    std::vector<PlannedTensor> plan;
    for (const auto& [name, tensor] : named_weights(config, random_weights(config, dtype))) {
      tensors[name] = tensor;
      plan.push_back({name, dtype, tensor.sizes().vec()});
    }
    write_checkpoint(base(), config, plan, [&](const std::string& name) { return tensors.at(name); });
    tiny_tokenizer(base());
    write_file(base() / "generation_config.json", "{\"do_sample\": false}\n");
  }

  fs::path base() const { return folder / "base"; }
  fs::path out() const { return folder / "out"; }

  // The run's folder. Its adapter is as training would leave it.
  fs::path make_run(const std::string& method, const Words& words, const std::string& name = "run",
                    std::int64_t context = 64, double size = 0.1) const {
    const Checkpoint checkpoint = open_checkpoint(base());
    const MethodOptions options = parse_method(method, words);
    const AdaptedModel adapted = adapt(checkpoint.config(), map_weights(checkpoint), options, at::kFloat);
    const c10::NoGradGuard constant;
    at::manual_seed(5);
    for (const Parameter& p : adapted.parameters) {
      // Magnitudes stay lengths: positive, and not those of the rows.
      const at::Tensor noise = at::randn(p.value.sizes()) * size;
      p.value.add_(p.name.ends_with("magnitude_vector") ? noise.abs() : noise);
    }
    Recipe recipe;
    recipe.model = base().string();
    recipe.model_hash = checkpoint.hash();
    recipe.data = {{"books.tokens", 1.0}};
    recipe.run = (folder / name).string();
    recipe.context = context;
    recipe.method = options;
    recipe.steps = 1;
    fs::create_directory(folder / name);
    write_file(folder / name / "recipe.yaml", recipe_yaml(recipe));
    save_adapter(adapted, folder / name / "adapter", base(), false);
    return folder / name;
  }

  TempFolder folder;
};

inline MergeOptions to(const fs::path& out) {
  MergeOptions options;
  options.out = out;
  options.version = "test";
  return options;
}

inline at::Tensor logits_of(const Llama& model) {
  const c10::InferenceMode inference;
  std::vector<std::int64_t> tokens;
  for (std::int64_t i = 0; i < 40; ++i) tokens.push_back((5 + 11 * i) % 61);
  ForwardInput in;
  in.tokens = at::tensor(tokens, at::kLong).unsqueeze(0);
  return model.logits(model.forward(in).last[0]).to(at::kFloat);
}

inline void change_tensor(const fs::path& file, const std::string& name, const at::Tensor& value) {
  std::map<std::string, at::Tensor> tensors;
  for (const auto& [key, tensor] : load_tensors(file)) tensors[key] = tensor.clone();
  REQUIRE(tensors.contains(name));
  tensors[name] = value;
  save_safetensors(file, tensors, true, {{"format", "pt"}});
}

template <typename Matcher>
void refused(const RunResult& result, const Matcher& matcher, const Bench& bench, std::ptrdiff_t entries) {
  CHECK(result.exit == 1);
  CHECK(result.out.empty());
  CHECK_THAT(result.err, matcher);
  CHECK(std::count(result.err.begin(), result.err.end(), '\n') == 1);
  CHECK(result.err.rfind("error: [", 0) == 0);
  CHECK_FALSE(fs::exists(bench.out()));
  CHECK(std::distance(fs::directory_iterator(bench.folder.path()), fs::directory_iterator()) == entries);
}

inline RunResult merge_run(const Bench& bench, Words words = {}, const std::function<void()>& before = {}) {
  words.insert(words.begin(), {"merge", (bench.folder / "run").string(), "--out", bench.out().string()});
  return run(words, before);
}

}  // namespace tapetune::test::merging
