// Merging: the arithmetic against whole matrices, and the model against the adapter beside its base.
#include "adapters/positions/tape/tape_files.h"
#include "catch.h"
#include "core/json.h"
#include "merge_bench.h"

namespace merge_test {

using namespace tapetune;
using namespace tapetune::test;
using namespace tapetune::test::merging;
namespace fs = std::filesystem;

namespace {

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

}  // namespace merge_test
