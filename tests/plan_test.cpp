// What `plan` says beforehand against what then happens.
#include "plan/plan.h"
#include "adapters/build_model.h"
#include "catch.h"
#include "core/json.h"
#include "model/loss.h"
#include "plan/activations.h"
#include "support.h"

namespace plan_test {

using namespace tapetune;
using namespace tapetune::test;

namespace {

ModelConfig config() {
  ModelConfig c;
  c.vocab_size = 512;
  c.hidden_size = 128;
  c.intermediate_size = 344;
  c.layers = 4;
  c.heads = 8;
  c.kv_heads = 4;
  c.head_dim = 16;
  c.context = 1024;
  return c;
}

const char* llama2 = R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000,
  "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
  "num_key_value_heads": 32, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": false,
  "torch_dtype": "float16"})";

}  // namespace

TEST_CASE("plan: Llama-2 7B's config alone gives the papers' counts") {
  const TempFolder folder;
  write_file(folder / "config.json", llama2);
  const auto plan = [&](const std::string& recipe) {
    const RunResult out =
        run({"plan", "llama2-7b-8k/" + recipe, "model=" + folder.path().string(), "--no-probe", "--json"});
    INFO(out.err);
    REQUIRE(out.exit == 0);
    return from_text(out.out);
  };
  const Json lora = plan("lora"), tape = plan("tape");
  CHECK(lora["parameters"] == 6738415616);
  CHECK(lora["trained_by_part"]["low-rank"] == 8388608);
  CHECK(lora["trained_by_part"]["embeddings"] == 131072000);
  CHECK(lora["trained_by_part"]["norms"] == 266240);
  CHECK(lora["tokens"] == 1000LL * 64 * 8192);
  CHECK(tape["trained_by_part"]["position"] == 17039360);
  CHECK(tape["trained_by_part"]["attention mixing"] == 32 * 1024);
  CHECK(lora["memory_bytes"]["weights"] == 2 * 6738415616);  // as config.json says, two bytes each
  CHECK(lora["memory_bytes"]["optimizer"] == 8 * lora["trained_parameters"].get<std::int64_t>());
  CHECK(lora["memory_bytes"]["gradients"].get<std::int64_t>() >= 4 * lora["trained_parameters"].get<std::int64_t>());

  const RunResult given = run({"plan", "llama2-7b-8k/lora", "model=" + folder.path().string(), "--flops", "1e15"});
  CHECK(given.exit == 0);
  CHECK(given.out.find("time (from --flops)") != std::string::npos);
  CHECK(given.out.find("131,072,000") != std::string::npos);
}

TEST_CASE("plan: the memory of a step is within 15% of what its tensors then hold") {
  struct Case {
    std::string method;
    std::vector<std::string> words;
  };
  const Case cases[] = {{"lora", {}},
                        {"lora", {"targets=q,v,gate,down", "train_also=embeddings,norms"}},
                        {"longlora", {}},
                        {"theta-scaling", {}},
                        {"tape", {}},
                        {"tape", {"rank=8", "train_also=norms"}},
                        {"full", {}},
                        {"lora", {"layers_to_transform=2,3"}},
                        {"lora", {"targets=q,v,gate,down", "exclude_modules=down_proj,layers.1.self_attn.q_proj"}}};
  for (const Case& c : cases) {
    for (const Checkpointing checkpointing : {Checkpointing::off, Checkpointing::full, Checkpointing::selective}) {
      const std::int64_t rows = 2, tokens = 384;
      const ModelConfig shape = config();
      const AdaptedModel adapted = adapt(shape, random_weights(shape, 1), parse_method(c.method, c.words), at::kFloat);
      ForwardInput in;
      in.tokens = at::randint(shape.vocab_size, {rows, tokens}, at::kLong);
      in.training = Training{checkpointing, 0};
      const auto step = [&] {
        const at::Tensor hidden = adapted.model.forward(in).last.flatten(0, 1);
        loss_sum(adapted.model, hidden, in.tokens.flatten(), in.training).backward();
      };
      step();  // gradients are there before the second, as in accumulation
      const double held = most_memory(step);
      const StepMemory planned = step_memory(adapted, rows, tokens, checkpointing);
      const double said = planned.activations + planned.loss;
      INFO(c.method << " " << fmt::format("{}", fmt::join(c.words, " ")) << ", checkpointing "
                    << static_cast<int>(checkpointing) << ": planned " << said / 1e6 << " MB, held " << held / 1e6);
      CHECK(said > 0.85 * held);
      CHECK(said < 1.15 * held);
    }
  }
}

TEST_CASE("plan: operations are counted for the projections that have LoRA matrices, and back to the first of them") {
  const ModelConfig shape = config();
  const std::int64_t tokens = 100;
  const auto flops = [&](const std::vector<std::string>& words) {
    return step_flops(adapt(shape, random_weights(shape, 1), parse_method("lora", words), at::kFloat), tokens);
  };
  const StepFlops all = flops({"targets=q"}), first = flops({"targets=q", "layers_to_transform=0"}),
                  excluded = flops({"targets=q", "exclude_modules=layers.1.self_attn.q_proj"}),
                  late = flops({"targets=q", "layers_to_transform=1,2"});
  const double matrices = 8 * (128 + 128), times = 2 * 3 * tokens;  // forward, and backward for inputs and weights
  CHECK(all.total(4) - first.total(4) == Approx(3 * matrices * times));
  CHECK(all.total(4) - excluded.total(4) == Approx(matrices * times));
  CHECK(late.layers[1] == all.layers[1]);
  CHECK(late.layers[0] < 0.5 * all.layers[0]);  // forward only
}

TEST_CASE("plan: an adapter of some layers is measured on a model with fewer") {
  const TempFolder folder;
  Json json = from_text(read_file(data("tiny-configs.json")))["default"];
  json["num_hidden_layers"] = 8;
  write_file(folder / "config.json", to_text(json));
  write_file(
      folder / "recipe.yaml",
      fmt::format("model: {}\ndata: a.tokens\nrun: r\ncontext: 64\ndtype: f32\nsteps: 1\nadapter: {{method: lora, "
                  "layers_to_transform: [6, 7], exclude_modules: [layers.7.self_attn.q_proj]}}\n",
                  folder.path().string()));
  const double seconds = probe_step(read_recipe(folder / "recipe.yaml", {}), /*budget=*/1);
  CHECK(seconds > 0);
  CHECK(std::isfinite(seconds));
}

TEST_CASE("plan: says what is missing") {
  const TempFolder folder;
  write_file(folder / "x.gguf", "GGUF");
  CHECK_THAT(run({"plan", "llama2-7b-8k/lora", "model=" + (folder / "x.gguf").string()}).err,
             Contains("is a GGUF file; convert it first: tapetune import"));
  const RunResult out = run({"plan", "llama2-7b-8k/lora", "model=/nowhere"});
  CHECK(out.exit == 1);
  CHECK(out.err.find("config.json: not found") != std::string::npos);
  CHECK(out.err.find("model=DIR") != std::string::npos);
}

}  // namespace plan_test
