// Merging: the arithmetic against whole matrices, the model against the adapter beside its base, and bad company.
#include "export/merge.h"

#include <c10/core/InferenceMode.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "adapters/checkpoints.h"
#include "adapters/peft.h"
#include "adapters/positions/tape/tape_files.h"
#include "catch.h"
#include "core/error.h"
#include "core/json.h"
#include "export/verify.h"
#include "support.h"
#include "run/open.h"

namespace merge_test {

using namespace tapetune;
using namespace tapetune::test;
namespace fs = std::filesystem;

namespace {

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

const std::vector<std::pair<std::string, Words>>& plain_methods() {
  static const std::vector<std::pair<std::string, Words>> all{
      {"lora", {}},
      {"lora", {"rank=4", "rslora=true", "targets=q,k,v,o,gate,up,down,lm_head"}},
      {"lora", {"dora=true", "train_also=embeddings,norms"}},
      {"lora", {"scaling=linear", "factor=2", "train_also=embeddings,norms,lm_head"}},
      {"lora", {"scaling=yarn", "factor=4"}},
      {"longlora", {"train_also=embeddings,norms"}},
      {"none", {"adapter.type=ia3", "train_also=embeddings,norms,lm_head"}},
      {"theta-scaling", {"theta=1e6"}},
      {"theta-scaling", {"scaling=linear", "factor=2", "train_also=embeddings,norms"}},
      {"full", {"scaling=dynamic", "factor=2"}},
      {"full", {}}};
  return all;
}

MergeOptions to(const fs::path& out) {
  MergeOptions options;
  options.out = out;
  options.version = "test";
  return options;
}

at::Tensor logits_of(const Llama& model) {
  const c10::InferenceMode inference;
  std::vector<std::int64_t> tokens;
  for (std::int64_t i = 0; i < 40; ++i) tokens.push_back((5 + 11 * i) % 61);
  ForwardInput in;
  in.tokens = at::tensor(tokens, at::kLong).unsqueeze(0);
  return model.logits(model.forward(in).last[0]).to(at::kFloat);
}

at::Tensor adapted_logits(const MergeInput& input) {
  return logits_of(load_adapter(input.config, map_weights(*input.base), input.adapter, at::kFloat).model);
}

at::Tensor merged_logits(const fs::path& folder) { return logits_of(Llama::open(open_checkpoint(folder), at::kFloat)); }

std::map<std::string, at::Tensor> adapter_tensors(const fs::path& run) {
  std::map<std::string, at::Tensor> named;
  for (const auto& [name, tensor] : load_tensors(run / "adapter" / "adapter_model.safetensors")) {
    named[name_from_disk(name)] = tensor;
  }
  return named;
}

void change_tensor(const fs::path& file, const std::string& name, const at::Tensor& value) {
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

RunResult merge_run(const Bench& bench, Words words = {}, const std::function<void()>& before = {}) {
  words.insert(words.begin(), {"merge", (bench.folder / "run").string(), "--out", bench.out().string()});
  return run(words, before);
}

}  // namespace

TEST_CASE("merge: scale B A is added in f32 and rounded once, with DoRA's lengths") {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const Words& words : {Words{}, Words{"rslora=true"}, Words{"dora=true", "rank=4", "targets=q,down"}}) {
      const Bench bench(false, dtype);
      const fs::path run = bench.make_run("lora", words);
      const MergeInput input = open_merge(run);
      const Merged merged(input);
      const auto trained = adapter_tensors(run);
      const Settings& lora = input.method.adapter;
      const auto rank = static_cast<double>(lora.whole("rank"));
      const double scale = lora.number("alpha") / (lora.flag("rslora") ? std::sqrt(rank) : rank);
      int adapted = 0;
      for (const PlannedTensor& tensor : merged.tensors()) {
        INFO(tensor.name << " " << toString(dtype));
        at::Tensor expected = input.base->tensor(tensor.name);
        const std::string module = tensor.name.substr(0, tensor.name.size() - 6);
        if (trained.contains(module + "lora_A.weight")) {
          ++adapted;
          at::Tensor sum = expected.to(at::kFloat) +
                           at::mm(trained.at(module + "lora_B.weight"), trained.at(module + "lora_A.weight")) * scale;
          if (lora.flag("dora"))
            sum = sum * (trained.at(module + "lora_magnitude_vector") / sum.norm(2, 1)).unsqueeze(1);
          expected = sum.to(dtype);
        }
        CHECK(tensor.dtype == dtype);
        const double ulp = dtype == at::kFloat ? 1e-6 : dtype == at::kBFloat16 ? 1.0 / 128 : 1.0 / 1024;
        const at::Tensor got = merged.tensor(tensor.name);
        CHECK(at::allclose(got.to(at::kFloat), expected.to(at::kFloat), ulp, 1e-6));
        // Nearly all to the last bit: a sum may be taken in another order.
        CHECK(got.eq(expected).to(at::kFloat).mean().item<double>() > 0.95);
      }
      CHECK(adapted == (lora.flag("dora") ? 6 : 12));
    }
  }
}

TEST_CASE("merge: a tensor in blocks of rows is the tensor") {
  const Bench bench(false, at::kBFloat16);
  const Merged merged(open_merge(bench.make_run("lora", {"dora=true", "train_also=embeddings"})));
  for (const PlannedTensor& tensor : merged.tensors()) {
    INFO(tensor.name);
    const at::Tensor whole = merged.tensor(tensor.name);
    std::vector<at::Tensor> blocks;
    for (std::int64_t begin = 0; begin < tensor.shape[0]; begin += 5) {
      blocks.push_back(merged.rows(tensor.name, begin, std::min<std::int64_t>(5, tensor.shape[0] - begin)).clone());
    }
    CHECK(at::allclose(at::cat(blocks).to(at::kFloat), whole.to(at::kFloat), 1.0 / 128, 1e-6));
  }
}

TEST_CASE("merge: the merged model says what the adapter says beside its base") {
  const Bench bench;
  int number = 0;
  for (const auto& [method, words] : plain_methods()) {
    INFO(method << " " << fmt::format("{}", fmt::join(words, " ")));
    const fs::path run = bench.make_run(method, words, fmt::format("run{}", ++number)),
                   out = bench.folder / fmt::format("out{}", number);
    const MergeInput input = open_merge(run);
    merge(input, to(out));
    const at::Tensor expected = adapted_logits(input), base = merged_logits(bench.base());
    CHECK(largest_difference(merged_logits(out), expected) < 1e-4);
    CHECK(largest_difference(base, expected) > 0.05);  // or the comparison would mean little
    const ModelConfig config = open_checkpoint(out).config();
    const ModelConfig planned = adapt(input.config, map_weights(*input.base), input.method, at::kFloat).model.config();
    CHECK(config.longest_context() == planned.longest_context());
    CHECK(config.rope.type == planned.rope.type);
    CHECK(config.rope.theta == planned.rope.theta);
    CHECK(config.rope.factor == planned.rope.factor);
    CHECK(read_file(out / "tokenizer.json") == read_file(bench.base() / "tokenizer.json"));
    CHECK(read_file(out / "generation_config.json") == read_file(bench.base() / "generation_config.json"));
  }
}

TEST_CASE("merge: a bf16 base stays bf16, --dtype changes it, and what did not train is copied to the bit") {
  const Bench bench(false, at::kBFloat16);
  const fs::path run = bench.make_run("lora", {"targets=q", "train_also=norms"});
  const MergeInput input = open_merge(run);
  merge(input, to(bench.out()));
  const Checkpoint base = open_checkpoint(bench.base()), merged = Checkpoint::open(bench.out());
  const auto trained = adapter_tensors(run);
  for (const auto& [name, stored] : merged.stored()) {
    INFO(name);
    CHECK(stored.entry.dtype == "BF16");
    if (name.find("q_proj") != std::string::npos) continue;
    const auto own = trained.find(name);
    CHECK(at::equal(merged.tensor(name), own == trained.end() ? base.tensor(name) : own->second.to(at::kBFloat16)));
  }
  CHECK(from_text(merged.config().json)["torch_dtype"] == "bfloat16");
  MergeOptions wide = to(bench.folder / "wide");
  wide.dtype = at::kFloat;
  merge(input, wide);
  CHECK(open_checkpoint(wide.out).dtype() == at::kFloat);
  CHECK(largest_difference(merged_logits(wide.out), adapted_logits(input)) < 1e-4);
  CHECK(largest_difference(merged_logits(bench.out()), adapted_logits(input)) < 0.5);
}

TEST_CASE("merge: a context that was trained is the model's context") {
  const Bench bench;
  merge(open_merge(bench.make_run("theta-scaling", {}, "run", 256)), to(bench.out()));
  CHECK(open_checkpoint(bench.out()).config().context == 256);
}

TEST_CASE("merge: tied embeddings stay tied unless training made them differ") {
  const Bench bench(true);
  const auto merged = [&](const std::string& name, const Words& words, double size = 0.1) {
    const MergeInput input = open_merge(bench.make_run("lora", words, "run-" + name, 64, size));
    merge(input, to(bench.folder / name));
    CHECK(largest_difference(merged_logits(bench.folder / name), adapted_logits(input)) < 1e-4);
    const Checkpoint result = open_checkpoint(bench.folder / name);
    CHECK(result.has("lm_head.weight") != result.config().tied_embeddings);
    CHECK(from_text(result.config().json)["tie_word_embeddings"] == result.config().tied_embeddings);
    return result.config().tied_embeddings;
  };
  CHECK(merged("untrained", {}));
  CHECK(merged("trained", {"train_also=embeddings"}));
  CHECK_FALSE(merged("untied", {"train_also=embeddings", "untie=true"}));
  CHECK_FALSE(merged("untied-head", {"train_also=lm_head", "untie=true"}));
  CHECK_FALSE(merged("lora-head", {"targets=q,lm_head"}));
  CHECK(merged("equal", {"train_also=embeddings,lm_head", "untie=true"}, 0));  // untied, but the same
}

TEST_CASE("merge: shards of any size hold the same tensors") {
  const Bench bench;
  const fs::path run = bench.make_run("lora", {"train_also=embeddings,norms"});
  const MergeInput input = open_merge(run);
  const Merged expected(input);
  for (const std::uint64_t size :
       {std::uint64_t{1}, std::uint64_t{4'000}, std::uint64_t{1'000'000}, std::uint64_t{50'000'000'000}}) {
    INFO(size);
    MergeOptions options = to(bench.out());
    options.shard_bytes = size;
    options.replace = true;
    merge(input, options);
    const Checkpoint merged = open_checkpoint(bench.out());
    CHECK((merged.shards() == 1) == (size >= 1'000'000));
    CHECK(merged.stored().size() == expected.tensors().size());
    for (const PlannedTensor& tensor : expected.tensors()) {
      CHECK(at::equal(merged.tensor(tensor.name), expected.tensor(tensor.name)));
    }
  }
}

TEST_CASE("merge: a base that was drawn by the recipe") {
  const Bench bench;
  const fs::path run = bench.folder / "scratch";
  fs::create_directory(run);
  write_file(run / "recipe.yaml",
             fmt::format("model: {{init: random, hidden: 32, layers: 2, heads: 4, ffn: 48, vocab: 61, tokenizer: {}}}\n"
                         "data: x.tokens\nrun: {}\ncontext: 32\nsteps: 1\nseed: 7\nadapter: {{method: lora}}\n",
                         bench.base().string(), run.string()));
  const Recipe recipe = read_recipe(run / "recipe.yaml");
  const ModelConfig config = random_model_config(recipe);
  const LlamaWeights weights = tapetune::random_weights(config, recipe.seed);
  const AdaptedModel adapted = adapt(config, weights, recipe.method, at::kFloat);
  {
    const c10::NoGradGuard constant;
    for (const Parameter& p : adapted.parameters) p.value.add_(0.05);
  }
  save_adapter(adapted, run / "adapter", "", false);
  merge(open_merge(run), to(bench.out()));
  CHECK(largest_difference(merged_logits(bench.out()), logits_of(adapted.model)) < 1e-4);
  CHECK(fs::exists(bench.out() / "tokenizer.json"));
}

TEST_CASE("merge: where it comes from stands beside the weights") {
  const Bench bench;
  const fs::path run = bench.make_run("lora", {"scaling=linear", "factor=2"});
  merge(open_merge(run), to(bench.out()));
  const Json json = from_text(read_file(bench.out() / "tapetune_provenance.json"));
  CHECK(json["tapetune"] == "test");
  CHECK(json["base"]["path"] == bench.base().string());
  CHECK(json["base"]["hash"] == open_checkpoint(bench.base()).hash());
  CHECK(json["method"]["method"] == "lora");
  CHECK(json["recipe"] == read_file(run / "recipe.yaml"));
  const std::string card = read_file(bench.out() / "README.md");
  CHECK_THAT(card, Contains("from_pretrained(\"out\"") && Contains(bench.base().string()) &&
                       Contains("`lora scaling=linear factor=2 rank=8") && Contains("128 (base model: 64)") &&
                       Contains("vllm serve out --max-model-len 128\n"));
}

TEST_CASE("merge: model_max_length is raised to the new context, and kept where it is larger or absent") {
  const Bench bench;
  const fs::path run = bench.make_run("lora", {"scaling=linear", "factor=2"}), name = "tokenizer_config.json";
  const auto merged_from = [&](const std::string& text) {
    write_file(bench.base() / name, text);
    fs::remove_all(bench.out());
    merge(open_merge(run), to(bench.out()));
    return read_file(bench.out() / name);
  };
  const Json raised = from_text(merged_from(R"({"bos_token": "<s>", "model_max_length": 64, "add_bos_token": true})"));
  CHECK(raised == from_text(R"({"bos_token": "<s>", "model_max_length": 128, "add_bos_token": true})"));
  for (const char* kept : {R"({"bos_token": "<s>", "model_max_length": 1000000000000000019884624838656})",
                           R"({"bos_token": "<s>", "model_max_length": 128})", R"({"bos_token": "<s>"})"}) {
    CHECK(merged_from(kept) == kept);
  }
}

TEST_CASE("merge: TAPE's folder has its position tensors, its code, and a config that leads there") {
  const Bench bench;
  const fs::path run = bench.make_run("tape", {"rank=4", "mix=per-head", "train_also=embeddings,norms"});
  const MergeInput input = open_merge(run);
  merge(input, to(bench.out()));
  for (const TapeFile& file : tape_files()) {
    CHECK(read_file(bench.out() / std::string(file.name)) == file.text);
    CHECK(file.text == read_file(fs::path(source_folder) / "adapters/positions/tape" / std::string(file.name)));
  }
  const Json config = from_text(read_file(bench.out() / "config.json"));
  CHECK(config["model_type"] == "tape_llama");
  CHECK(config["auto_map"]["AutoModelForCausalLM"] == "modeling_tape.TapeForCausalLM");
  CHECK(config["tape"]["mix"] == "per-head");
  CHECK(config["tape"]["width"] == 4);
  CHECK(config["head_dim"] == 8);
  const auto tensors = load_tensors(bench.out() / "model.safetensors");
  const auto trained = adapter_tensors(run);
  CHECK(tensors.size() == tensor_specs(input.config).size() + 3 * 4);
  for (const auto& [name, tensor] : trained) {
    INFO(name);
    if (name.find(".lora_") == std::string::npos) CHECK(at::equal(tensors.at(name), tensor));
  }
  CHECK_FALSE(at::equal(tensors.at("model.layers.0.self_attn.q_proj.weight"),
                        input.base->tensor("model.layers.0.self_attn.q_proj.weight")));
  const fs::path ablation = bench.make_run("tape", {"equivariant=false"}, "ablation");
  CHECK_THROWS_WITH(merge(open_merge(ablation), to(bench.folder / "no")),
                    Contains("model.layers.0.pe.down_proj_sine.weight: was trained, but nothing in a merged model "
                             "corresponds to it"));
}

TEST_CASE(
    "merge: what TAPE became is read again, merged again, trained on, and refused where positions would be lost") {
  const Bench bench;
  for (const std::string mix : {"full", "per-head"}) {
    INFO(mix);
    const fs::path before =
        bench.make_run("tape", {"mix=" + mix, "width=2", "rank=4", "scaling=linear", "factor=2"}, "run-" + mix);
    const fs::path out = bench.folder / mix, again = bench.folder / (mix + "-again");
    merge(open_merge(before), to(out));
    const Checkpoint merged = open_checkpoint(out);
    const at::Tensor expected = adapted_logits(open_merge(before));
    const AdaptedModel model = open_adapted(merged, map_weights(merged), at::kFloat);
    CHECK(model.options.positions.whole("width") == 2);
    CHECK((logits_of(model.model) - expected).abs().max().item<double>() < 1e-5);
    CHECK((logits_of(Llama::open(merged, at::kFloat)) - expected).abs().max().item<double>() > 0.01);
    merge(open_merge(out), to(again));
    CHECK(read_file(again / "model.safetensors") == read_file(out / "model.safetensors"));
    CHECK(read_file(again / "config.json") == read_file(out / "config.json"));
    CHECK(run({"verify", before.string(), out.string()}).exit == 0);
    CHECK(run({"verify", again.string(), out.string()}).exit == 0);
    // The settings may be given by hand.
    const std::string ids = "3,1,4,1,5", file = (bench.folder / "logits").string();
    const auto logits = [&](const Words& more) {
      Words words{"logits", out.string(), "--tokens", ids, "--out", file, "--force"};
      words.insert(words.end(), more.begin(), more.end());
      REQUIRE(run(words).exit == 0);
      return load_tensors(file).at("logits").clone();
    };
    CHECK(at::equal(logits({}), logits({"--method", "tape", "mix=" + mix, "width=2"})));
    CHECK_FALSE(at::equal(logits({}), logits({"--method", "none"})));
  }

  const std::string out = (bench.folder / "full").string(), no = (bench.folder / "no").string();
  const auto refused = [&](const Words& words, const std::string& why) {
    INFO(words.front());
    const RunResult result = run(words);
    CHECK(result.exit == 1);
    CHECK_THAT(result.err, Contains("position") && Contains(why));
    CHECK_FALSE(fs::exists(no));
  };
  refused({"convert", out, "--out", no}, "tapetune merge");
  refused({"export", out, "--gguf", "f16", "--out", no}, "llama.cpp does not support");
  CHECK_THAT(run({"merge", out, "--out", no + ".gguf"}).err,
             Contains("merge writes a folder; for a GGUF file add --gguf q8_0"));
  CHECK_FALSE(fs::exists(no + ".gguf"));
  refused({"logits", out, "--tokens", "1", "--out", no, "--method", "lora"}, "drop --method");
  refused({"logits", out, "--tokens", "1", "--out", no, "--adapter", out}, "drop --adapter");
  refused({"logits", bench.base().string(), "--tokens", "1", "--out", no, "--adapter", bench.base().string()},
          "give it as the model");
  refused({"merge", out, "--model", bench.base().string(), "--out", no}, "drop --model");

  Recipe recipe;
  recipe.model = out;
  recipe.method = parse_method("lora", {});
  CHECK_THROWS_WITH(open_base(recipe), Contains("init_from=" + out));
  recipe.method = parse_method("tape", Words{"width=2"});
  recipe.init_from = out;
  const BaseModel base = open_base(recipe);
  const AdaptedModel further = adapt(base.config, base.weights, recipe.method, at::kFloat);
  restore_parameters(further, base.weights, recipe.init_from);
  CHECK((logits_of(further.model) - adapted_logits(open_merge(bench.folder / "run-full"))).abs().max().item<double>() <
        1e-5);
}

TEST_CASE("merge --adapter: a copy that loads alike, --no-with-base for tape") {
  const Bench bench;
  const fs::path before = bench.make_run("lora", {"dora=true", "train_also=embeddings,norms"});
  REQUIRE(merge_run(bench, {"--adapter"}).exit == 0);
  const Checkpoint base = open_checkpoint(bench.base());
  const auto logits = [&](const fs::path& adapter) {
    return logits_of(load_adapter(base.config(), map_weights(base), adapter, at::kFloat).model);
  };
  CHECK(at::equal(logits(bench.out()), logits(before / "adapter")));
  CHECK(read_file(bench.out() / "adapter_model.safetensors") ==
        read_file(before / "adapter" / "adapter_model.safetensors"));
  CHECK(from_text(read_file(bench.out() / "adapter_config.json"))["base_model_name_or_path"] == bench.base().string());
  CHECK(from_text(read_file(bench.out() / "tapetune_provenance.json"))["base"]["hash"] == base.hash());
  CHECK_THAT(read_file(bench.out() / "README.md"), Contains("PeftModel.from_pretrained(model, \"out\")"));

  bench.make_run("tape", {}, "tape");
  const std::string alone = (bench.folder / "alone").string();
  const RunResult tape = run({"merge", (bench.folder / "tape").string(), "--no-with-base", "--out", alone});
  CHECK(tape.exit == 0);
  CHECK_THAT(tape.err, Contains("note: only tapetune loads this adapter (tape), PEFT does not"));
  CHECK_THAT(tape.out, Contains("wrote " + alone + " (5 files, "));
  CHECK(fs::exists(fs::path(alone) / "adapter_model.safetensors"));
  CHECK_FALSE(fs::exists(fs::path(alone) / "model.safetensors"));
  const RunResult copied = run({"merge", (bench.folder / "tape").string(), "--adapter", "--out", alone, "--force"});
  CHECK(copied.exit == 0);
  CHECK_THAT(copied.err, Contains("note: only tapetune loads this adapter (tape), PEFT does not"));
  const RunResult other = merge_run(bench, {"--no-with-base", "--force"});
  CHECK(other.exit == 1);
  CHECK_THAT(other.err, Contains("PEFT does not load, as tape's") && Contains("--adapter"));
  bench.make_run("full", {}, "full");
  const RunResult full = run({"merge", (bench.folder / "full").string(), "--adapter", "--out", alone, "--force"});
  CHECK(full.exit == 1);
  CHECK_THAT(full.err, Contains("method full has no adapter"));
}

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

}  // namespace merge_test
