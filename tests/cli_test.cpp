// The verbs as a user runs them.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>

#include "catch.h"
#include "checkpoint/writer.h"
#include "core/json.h"
#include "support.h"

namespace cli_test {

using namespace tapetune;
using namespace tapetune::test;

namespace {

// Two steps on the text t.txt beside the model.
std::string tiny_recipe(const TinyModel& model) {
  return fmt::format("model: {}\ndata: {}\nrun: {}\ncontext: 16\nadapter: lora\nsteps: 2\nbatch: 1\nmicro_batch: 1\n",
                     model.path(), (model.folder / "t.txt").string(), (model.folder / "run").string());
}

}  // namespace

TEST_CASE("inspect tells what is in a checkpoint") {
  const TinyModel model;
  const RunResult table = run({"inspect", model.path()});
  CHECK(table.exit == 0);
  CHECK_THAT(table.out, Contains("LlamaForCausalLM") && Contains("F32") && Contains("context       48"));
  const Json json = from_text(run({"inspect", model.path(), "--json"}).out);
  std::uint64_t expected = 0;
  for (const auto& [name, tensor] : load_tensors(data("tiny-model.safetensors")))
    expected += static_cast<std::uint64_t>(tensor.numel());
  CHECK(json["parameters"] == expected);
  CHECK(json["kv_heads"] == 2);
  CHECK(json["tokenizer"] == true);
}

TEST_CASE("logits writes what transformers computes") {
  const TinyModel model;
  auto golden = load_tensors(data("tiny-logits.safetensors"));
  std::string ids;
  for (std::int64_t i = 0; i < 40; ++i) ids += fmt::format("{} ", golden.at("tokens")[i].item<std::int64_t>());
  write_file(model.folder / "ids", ids);
  const std::string out = (model.folder / "logits.safetensors").string();
  const RunResult result =
      run({"logits", model.path(), "--tokens-file", (model.folder / "ids").string(), "--out", out, "--hidden"});
  CHECK(result.exit == 0);
  CHECK(result.err.empty());
  auto written = load_tensors(out);
  CHECK(largest_difference(written.at("logits"), golden.at("default.40")) < 1e-4);
  CHECK(largest_difference(written.at("hidden.1"), golden.at("hidden.1")) < 1e-4);
  CHECK(written.size() == 4);
}

TEST_CASE("logits beyond the context are given with a warning") {
  const TinyModel model;
  std::string ids = "1";
  for (int i = 0; i < 60; ++i) ids += ",3";
  const RunResult result = run({"logits", model.path(), "--tokens", ids, "--out", (model.folder / "o").string()});
  CHECK(result.exit == 0);
  CHECK(result.err.rfind("warning: 61 tokens are more than the model's context of 48", 0) == 0);
}

TEST_CASE("generate streams the text that --json reports, for one prompt and for several") {
  const TinyModel model;
  const std::vector<std::string> common{"--max-new-tokens", "12", "--ignore-eos"};
  const auto with = [&](std::vector<std::string> words) {
    words.insert(words.begin(), {"generate", model.path()});
    words.insert(words.end(), common.begin(), common.end());
    return run(words);
  };
  const Json alone = from_text(with({"--prompt", "ab c", "--json"}).out);
  CHECK(alone["prompt_tokens"].size() == 5);
  CHECK(alone["prompt_tokens"][0] == 1);
  CHECK(alone["tokens"].size() == 12);
  CHECK(alone["stopped"] == "length");
  CHECK(with({"--prompt", "ab c"}).out == "ab c" + alone["text"].get<std::string>() + "\n");
  CHECK(with({"--prompt", "ab c", "--no-echo"}).out == alone["text"].get<std::string>() + "\n");
  CHECK(from_text(with({"--tokens", "1,8,9", "--json"}).out)["tokens"].size() == 12);
  // Each --prompt takes one text, so that the model may also come last.
  CHECK(lines_of(with({"--prompt", "ab c", "--prompt", "z", "--json"}).out).size() == 2);
  CHECK(run({"generate", "--prompt", "ab c", model.path(), "--max-new-tokens", "1"}).exit == 0);

  write_file(model.folder / "prompts", "ab c\nz\n\nhello there\n");
  const std::vector<std::string> several =
      lines_of(with({"--prompt-file", (model.folder / "prompts").string(), "--json"}).out);
  REQUIRE(several.size() == 3);
  CHECK(from_text(several[0])["tokens"] == alone["tokens"]);
  for (const std::string& line : several) {
    const Json object = from_text(line);
    CHECK(from_text(with({"--prompt", object["prompt"], "--json"}).out)["tokens"] == object["tokens"]);
  }
  const RunResult timed = with({"--prompt", "ab", "--timing"});
  CHECK(from_text(timed.err)["decode_tokens"] == 11);
}

TEST_CASE("generate ends at the EOS that generation_config.json names") {
  const TinyModel model;
  const auto tokens = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"generate", model.path(), "--prompt", "ab", "--max-new-tokens", "20", "--json"});
    return from_text(run(more).out);
  };
  const Json free = tokens({"--ignore-eos"});
  write_file(model.folder / "m" / "generation_config.json",
             fmt::format(R"({{"eos_token_id": [{}]}})", free["tokens"][3].get<int>()));
  const Json ended = tokens({});
  CHECK(ended["stopped"] == "eos");
  CHECK(ended["tokens"].size() <= 4);
  CHECK(ended["tokens"].back() == free["tokens"][3]);
}

TEST_CASE("an end token that the user wrote stays, one that the tokenizer adds does not") {
  const TinyModel model;
  const auto prompt_tokens = [&](const std::string& prompt) {
    return from_text(
        run({"generate", model.path(), "--prompt", prompt, "--max-new-tokens", "1", "--json"}).out)["prompt_tokens"];
  };
  const Json plain = prompt_tokens("ab");
  CHECK(plain.size() == 3);
  CHECK(prompt_tokens("ab</s>").back() == 2);
  write_file(model.folder / "m" / "tokenizer_config.json",
             R"({"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": true, "add_eos_token": true})");
  CHECK(prompt_tokens("ab") == plain);
}

TEST_CASE("results that cannot be written are no success") {
  const TinyModel model;
  for (const std::vector<std::string>& words :
       {std::vector<std::string>{"inspect", model.path()},
        {"generate", model.path(), "--prompt", "ab", "--max-new-tokens", "3"}}) {
    std::string command = std::string("'") + tapetune_binary + "'";
    for (const std::string& word : words) command += " '" + word + "'";
    CHECK(WEXITSTATUS(std::system((command + " >/dev/full 2>/dev/null").c_str())) == 1);
  }
}

TEST_CASE("an interrupted tokenize ends with exit 3, even while it waits for input") {
  const TinyModel model;
  int pipe_ends[2];
  REQUIRE(::pipe(pipe_ends) == 0);
  const pid_t child = start({"-q", "tokenize", model.path()}, [&] { ::dup2(pipe_ends[0], 0); });
  wait_for_handler(child, SIGINT);
  // A signal before it reads would be noticed with the next line only; asleep for half a second, it waits for input.
  const auto asleep = [&] { return read_file(fmt::format("/proc/{}/stat", child)).find(") S ") != std::string::npos; };
  for (int i = 0, times = 0; i < 6000 && times < 50; ++i) {
    times = asleep() ? times + 1 : 0;
    ::usleep(10'000);
  }
  ::kill(child, SIGINT);
  int status = 0;
  ::waitpid(child, &status, 0);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 3);
}

#ifndef __SANITIZE_ADDRESS__  // sanitized programs do not start again
TEST_CASE("the program keeps its name, and sets GOMP_SPINCOUNT once unless the user chose how OpenMP waits") {
  const TinyModel model;
  const auto chosen = [&](const char* name, const char* value) {
    int pipe_ends[2];
    REQUIRE(::pipe(pipe_ends) == 0);
    const pid_t child = start({"-q", "tokenize", model.path()}, [&] {
      ::dup2(pipe_ends[0], 0);
      ::unsetenv("GOMP_SPINCOUNT");  // the tests have it themselves
      ::unsetenv("OMP_WAIT_POLICY");
      if (name != nullptr) ::setenv(name, value, 1);
    });
    wait_for_handler(child, SIGINT);
    CHECK(lines_of(read_file(fmt::format("/proc/{}/comm", child))) == std::vector<std::string>{"tapetune"});
    std::string environment = read_file(fmt::format("/proc/{}/environ", child));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    ::close(pipe_ends[0]);
    ::close(pipe_ends[1]);
    std::replace(environment.begin(), environment.end(), '\0', '\n');
    std::vector<std::string> found = lines_of(environment);
    std::erase_if(found, [](const std::string& entry) { return !entry.starts_with("GOMP_SPINCOUNT="); });
    return found;
  };
  CHECK(chosen(nullptr, "") == std::vector<std::string>{"GOMP_SPINCOUNT=1000"});
  CHECK(chosen("GOMP_SPINCOUNT", "7") == std::vector<std::string>{"GOMP_SPINCOUNT=7"});
  CHECK(chosen("OMP_WAIT_POLICY", "active").empty());
}

TEST_CASE("the program runs under the dynamic linker") {
  const std::filesystem::path linker = "/lib64/ld-linux-x86-64.so.2";
  if (!std::filesystem::exists(linker)) {
    fmt::print("SKIPPED: {} is not there\n", linker.string());
    return;
  }
  const std::string command =
      fmt::format("env -u GOMP_SPINCOUNT -u OMP_WAIT_POLICY {} '{}' --version", linker.string(), tapetune_binary);
  CHECK(std::system((command + " >/dev/null 2>&1").c_str()) == 0);
}
#endif

TEST_CASE("ranks that launch starts have the program's name") {
  const TinyModel model;
  write_file(model.folder / "t.txt", std::string(2000, 'a'));
  write_file(model.folder / "r.yaml", tiny_recipe(model));
  const pid_t launcher = start({"-q", "launch", "--nproc", "1", "--", "train", (model.folder / "r.yaml").string()},
                               [] { ::setenv("TAPETUNE_STOP_AT", "step:1", 1); });
  pid_t rank = 0;
  const auto stopped = [&] {
    std::ifstream(fmt::format("/proc/{}/task/{}/children", launcher, launcher)) >> rank;
    std::ifstream stat(fmt::format("/proc/{}/stat", rank));
    std::string line;
    return std::getline(stat, line) && line.find(") T ") != std::string::npos;
  };
  for (int i = 0; i < 60'000 && !stopped() && ::waitpid(launcher, nullptr, WNOHANG) == 0; ++i) ::usleep(1000);
  REQUIRE(stopped());
  CHECK(read_file(fmt::format("/proc/{}/comm", rank)) == "tapetune\n");
  ::kill(rank, SIGKILL);
  ::waitpid(launcher, nullptr, 0);
}

TEST_CASE("training beyond the scaled context is warned of with settings that the recipe takes") {
  const TinyModel model;
  write_file(model.folder / "t.txt", std::string(2000, 'a'));
  write_file(model.folder / "r.yaml", tiny_recipe(model));
  int runs = 0;
  const auto told = [&](std::vector<std::string> settings) {
    settings.insert(settings.begin(), {"train", (model.folder / "r.yaml").string(), "context=400",
                                       fmt::format("run={}", (model.folder / fmt::format("run{}", ++runs)).string())});
    const RunResult result = run(settings);
    INFO(result.err);
    CHECK(result.exit == 0);
    return result.err;
  };
  CHECK_THAT(told({"positions.scaling=none"}), Contains("set positions.factor=8.34 and positions.scaling=linear"));
  CHECK_THAT(told({"positions.scaling=linear", "positions.factor=8.34"}), !Contains("beyond the"));
  for (const char* scaled : {"yarn", "llama3"}) {
    tiny_checkpoint(model.folder / "m", scaled);
    CHECK_THAT(told({}), Contains("set positions.theta above 10000, or use the model from before it was extended"));
    CHECK_THAT(told({"positions.theta=1e6"}), !Contains("beyond the"));
  }
}

TEST_CASE("tokenize prints ids a line and turns them back") {
  const TinyModel model;
  write_file(model.folder / "text", "ab\n\nz\n");
  const RunResult ids = run({"tokenize", model.path(), "--file", (model.folder / "text").string()});
  CHECK(lines_of(ids.out).size() == 3);
  CHECK(lines_of(ids.out)[1] == "[1]");
  write_file(model.folder / "ids", ids.out);
  CHECK(run({"tokenize", model.path(), "--decode", "--file", (model.folder / "ids").string()}).out ==
        "\"ab\"\n\"\"\n\"z\"\n");
}

TEST_CASE("convert writes a folder with the same logits, other shards and all files") {
  const TinyModel model;
  const std::string out = (model.folder / "out").string();
  const RunResult converted = run({"convert", model.path(), "--out", out, "--shard-size", "30KB"});
  CHECK(converted.exit == 0);
  std::uintmax_t bytes = 0, files = 0;
  for (const auto& [name, text] : contents(out)) {
    bytes += text.size();
    ++files;
  }
  CHECK(files > 4);
  CHECK(converted.out == fmt::format("wrote {} ({} files, {:.0f} kB)\n", out, files, static_cast<double>(bytes) / 1e3));
  CHECK(std::filesystem::exists(model.folder / "out" / "model.safetensors.index.json"));
  CHECK(std::filesystem::exists(model.folder / "out" / "tokenizer_config.json"));
  for (const std::string& folder : {model.path(), out}) {
    CHECK(run({"logits", folder, "--tokens", "1,2,3", "--out", folder + ".logits"}).exit == 0);
  }
  CHECK(read_file(model.path() + ".logits") == read_file(out + ".logits"));
}

TEST_CASE("an adapter is written, inspected, scored and generated with") {
  const TinyModel model;
  const std::string folder = (model.folder / "adapter").string(), out = model.out();
  REQUIRE(
      run({"adapter", model.path(), "--method", "lora", "rank=4", "targets=q,v,down", "--seed", "3", "--out", folder})
          .exit == 0);
  const RunResult again = run({"adapter", model.path(), "--method", "lora", "--out", folder});
  CHECK(again.exit == 1);
  CHECK_THAT(again.err, Contains("exists"));
  const Json told = from_text(run({"inspect", model.path(), "--adapter", folder, "--json"}).out)["adapter"];
  CHECK(told["method"] == "lora");
  CHECK(told["settings"]["targets"] == "q,v,down");
  // 2 layers; q: 32 -> 64, v: 32 -> 32, down: 56 -> 32
  CHECK(told["trained_parameters"] == 2 * 4 * ((32 + 64) + (32 + 32) + (56 + 32)));
  CHECK_THAT(run({"inspect", model.path(), "--method", "tape", "train_also=norms"}).out, Contains("attention mixing"));

  // At its start an adapter changes nothing, and a method is what it is at its start.
  const auto logits = [&](std::vector<std::string> words) {
    words.insert(words.begin(), {"logits", model.path(), "--tokens", "1,5,9,20", "--out", out, "--force"});
    const RunResult result = run(words);
    INFO(result.err);
    REQUIRE(result.exit == 0);
    return load_tensors(out).at("logits").clone();
  };
  const at::Tensor plain = logits({});
  CHECK(largest_difference(logits({"--adapter", folder}), plain) < 1e-6);
  const std::vector<std::string> speak{"generate",         model.path(), "--tokens", "1,5,9",
                                       "--max-new-tokens", "8",          "--json"};
  const auto spoken = [&] {
    std::vector<std::string> words = speak;
    words.insert(words.end(), {"--adapter", folder});
    return from_text(run(words).out)["tokens"];
  };
  CHECK(spoken() == from_text(run(speak).out)["tokens"]);
  CHECK(at::equal(logits({"--method", "tape"}), plain));
  CHECK(largest_difference(logits({"--method", "none", "scaling=linear", "factor=4"}), plain) > 1e-3);

  // Away from it, both change.
  const std::string file = folder + "/adapter_model.safetensors";
  auto tensors = load_tensors(file);
  at::manual_seed(1);
  for (auto& [name, tensor] : tensors) tensor = at::randn(tensor.sizes());
  save_safetensors(file, tensors, true, {{"format", "pt"}});
  CHECK(largest_difference(logits({"--adapter", folder}), plain) > 0.1);
  const Json tokens = spoken();
  CHECK(tokens != from_text(run(speak).out)["tokens"]);
  // What is spoken is what the logits say.
  std::vector<std::int64_t> text{1, 5, 9};
  for (std::size_t i = 0; i < 3; ++i) {
    REQUIRE(run({"logits", model.path(), "--out", out, "--force", "--adapter", folder, "--tokens",
                 fmt::format("{}", fmt::join(text, ","))})
                .exit == 0);
    CHECK(load_tensors(out).at("logits")[-1].argmax().item<std::int64_t>() == tokens[i].get<std::int64_t>());
    text.push_back(tokens[i].get<std::int64_t>());
  }
  const RunResult both =
      run({"logits", model.path(), "--tokens", "1", "--out", out, "--adapter", folder, "--method", "lora"});
  CHECK(both.exit == 2);
}

TEST_CASE("a longer context from a method's scaling is the context that commands use") {
  const TinyModel model;
  const auto generate = [&](const std::vector<std::string>& more) {
    std::vector<std::string> words{"generate",         model.path(), "--tokens",     "1",
                                   "--max-new-tokens", "1000",       "--ignore-eos", "--json"};
    words.insert(words.end(), more.begin(), more.end());
    return from_text(run(words).out)["tokens"].size();
  };
  const std::size_t context = generate({}) + 1;
  CHECK(generate({"--method", "tape", "scaling=linear", "factor=2"}) == 2 * context - 1);
}

TEST_CASE("check gradients writes the loss and a gradient for everything that trains") {
  const TinyModel model;
  const auto gradients = [&](const std::string& mode) {
    const RunResult result =
        run({"check", "gradients", model.path(), "--method", "tape", "rank=2", "train_also=norms", "--tokens",
             "1,5,9,20,33,7", "--checkpointing", mode, "--out", model.out(), "--force"});
    INFO(result.err);
    REQUIRE(result.exit == 0);
    auto tensors = load_tensors(model.out());
    for (auto& [name, tensor] : tensors) tensor = tensor.clone();
    return tensors;
  };
  const auto off = gradients("off"), selective = gradients("selective");
  CHECK(off.contains("loss"));
  CHECK(off.contains("grad.model.layers.0.pe.up_proj.weight"));
  CHECK(off.contains("grad.model.layers.1.self_attn.q_proj.lora_B.weight"));
  CHECK(off.contains("grad.model.norm.weight"));
  CHECK_FALSE(off.contains("grad.model.layers.1.pe.up_proj.weight"));  // the last layer's update feeds nothing
  CHECK(off.size() == selective.size());
  for (const auto& [name, gradient] : off) CHECK(largest_difference(selective.at(name), gradient) < 1e-5);
}

TEST_CASE("check shift tells an equivariant method from one that is not") {
  const TinyModel model;
  const RunResult result = run({"check", "shift", model.path(), "--method", "tape", "--tokens", "1,5,9,20,33,7,8,9,40",
                                "--spread", "0.2", "--dtype", "f64", "--json"});
  INFO(result.err);
  REQUIRE(result.exit == 0);
  const Json report = from_text(result.out);
  REQUIRE(report.size() == 3);
  const auto last = [&](const char* name, const char* kind) { return report[name][kind]["layers"].back(); };
  for (const char* name : {"RoPE", "TAPE"}) {
    const double exact = name == std::string("TAPE") ? 1e-9 : 1e-6;  // plain angles are f32, as in transformers
    CHECK(last(name, "shift ids")["attention"].get<double>() < exact);
    CHECK(last(name, "shift ids")["position"].get<double>() < exact);
    CHECK(last(name, "add tokens")["attention"].get<double>() > 1e-6);  // what was added is seen
  }
  CHECK(last("RoPE", "add tokens")["position"].get<double>() < 1e-6);
  CHECK(last("TAPE without equivariance", "shift ids")["position"].get<double>() > 1e-4);
  CHECK(last("TAPE without equivariance", "shift ids")["attention"].get<double>() > 1e-7);
  CHECK_THAT(run({"check", "shift", model.path(), "--text", "the quick fox"}).out,
             Contains("TAPE without equivariance"));
}

}  // namespace cli_test
