// The loop: the reference's trajectories, runs that are cut off at any place, and what a run folder refuses.
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <random>
#include <thread>

#include "adapters/build_model.h"
#include "catch.h"
#include "checkpoint/writer.h"
#include "core/json.h"
#include "data/token_file.h"
#include "model/loss.h"
#include "support.h"
#include "train/adamw.h"
#include "train/schedule.h"

namespace train_test {

using namespace tapetune;
using namespace tapetune::test;
namespace fs = std::filesystem;

namespace {

// A tiny model, a token file and a recipe that trains on it in a second.
struct Run {
  explicit Run(const std::string& adapter = "{method: lora, rank: 2}", const std::string& more = "") {
    TokenFileInfo info;
    info.vocabulary_hash = read_vocabulary(model.folder / "m").hash;
    info.vocabulary_size = 61;
    TokenFileWriter writer(data(), false, info);
    std::mt19937 random(4);
    std::uint32_t token = 3;
    for (int i = 0; i < 6000; ++i) {
      token = (token * 5 + random() % 3) % 58 + 3;  // a text with something to learn
      writer.append(token);
      if (i % 500 == 499) writer.end_document();
    }
    writer.commit();
    write_file(recipe(), fmt::format("model: {}\ndata: {}\nrun: {}\ncontext: 32\nadapter: {}\n{}steps: 12\nbatch: 4\n"
                                     "optimizer: {{lr: 1.0e-2}}\nsave_every: 3\nseed: 5\ndtype: f32\n",
                                     model.path(), data(), folder(), adapter, more));
  }
  std::string data() const { return (model.folder / "data.tokens").string(); }
  std::string recipe() const { return (model.folder / "recipe.yaml").string(); }
  std::string folder(const std::string& name = "run") const { return (model.folder / name).string(); }
  RunResult train(std::vector<std::string> words = {}) const {
    words.insert(words.begin(), {"train", recipe(), "--threads", "1"});
    return run(words);
  }
  TinyModel model;
};

std::string result(const std::string& folder) {
  return read_file(fs::path(folder) / "adapter" / "adapter_model.safetensors");
}

// Those that a run has written to its metrics by now.
std::int64_t steps_in(const std::string& folder) {
  std::error_code status;
  const fs::path file = fs::path(folder) / "metrics.jsonl";
  if (!fs::exists(file, status)) return 0;
  const std::string text = read_file(file);
  return std::count(text.begin(), text.end(), '\n');
}

pid_t start_training(const std::string& recipe, const std::string& steps) {
  return start({"train", recipe, steps, "--threads", "1"}, [] {
    redirect("/dev/null", stderr);
    redirect("/dev/null", stdout);
  });
}

}  // namespace

TEST_CASE("training: five steps of LongLoRA and TAPE follow the reference") {
  const auto base = shared("data/stories260K");
  for (const std::string method : {"tape", "longlora"}) {
    const auto file = shared("golden/trajectories/" + method + ".safetensors");
    if (file.empty() || base.empty()) return;
    const Checkpoint checkpoint = Checkpoint::open(base);
    const auto golden = load_tensors(file);
    for (const std::string warmup : {"", "_warmup20"}) {
      const std::vector<std::string> words{"train_also=embeddings,norms", "scaling=linear", "factor=4"};
      const AdaptedModel adapted =
          adapt(checkpoint.config(), map_weights(checkpoint), parse_method(method, words), at::kFloat);
      {
        const c10::NoGradGuard setting;
        for (const Parameter& p : adapted.parameters) p.value.copy_(golden.at("init." + p.name));
      }
      AdamW optimizer(adapted.parameters, {});
      Schedule schedule;
      schedule.peak = 1e-3;
      schedule.warmup = warmup.empty() ? 0 : 20;
      for (std::int64_t step = 0; step < 5; ++step) {
        INFO(method << warmup << ", step " << step);
        for (const Parameter& p : adapted.parameters) p.value.mutable_grad().reset();
        const at::Tensor batch = golden.at("batches")[step].to(at::kLong);
        ForwardInput in;
        in.tokens = batch;
        in.training = Training{Checkpointing::full, 0};
        const at::Tensor hidden = adapted.model.forward(in).last.narrow(1, 0, 1023).flatten(0, 1);
        const at::Tensor loss = loss_sum(adapted.model, hidden, batch.narrow(1, 1, 1023).flatten()) / (2 * 1023.0);
        loss.backward();
        const double norm = optimizer.clip(0), expected = golden.at("grad_norms" + warmup)[step].item<double>();
        CHECK(std::abs(loss.item<double>() - golden.at("losses" + warmup)[step].item<double>()) < 2e-5);
        CHECK(std::abs(norm - expected) < 1e-4 * expected);
        optimizer.step(schedule.rate(step));
      }
    }
  }
}

TEST_CASE("training: the loss falls, and the result is an adapter that commands load") {
  const Run run_;
  const RunResult done = run_.train({"steps=30"});
  INFO(done.err);
  REQUIRE(done.exit == 0);
  const auto lines = untimed_metrics(run_.folder());
  REQUIRE(lines.size() == 30);
  CHECK(lines.back()["loss"].get<double>() < lines.front()["loss"].get<double>() - 0.05);
  CHECK(lines.back()["step"] == 30);
  CHECK(run({"inspect", run_.model.path(), "--adapter", run_.folder() + "/adapter"}).exit == 0);
}

TEST_CASE("training: --timing says when the first step began, on the clock that all processes share") {
  const auto now = [] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  };
  const Run run_;
  const double before = now();
  const RunResult done = run_.train({"--timing", "--quiet"});
  const double after = now();
  INFO(done.err);
  REQUIRE(done.exit == 0);
  const auto at = from_text(done.err)["first_step_at"].get<double>();
  CHECK(before < at);
  CHECK(at < after);
}

TEST_CASE("training: a run that is killed at any moment and resumed ends bit for bit as an uninterrupted one") {
  for (const std::string adapter :
       {"{method: lora, rank: 2, dropout: 0.2}", "{method: longlora, rank: 2}", "{method: theta-scaling, rank: 2}",
        "{method: tape, random_offset: true}", "{method: full}"}) {
    const Run whole(adapter), cut(adapter);
    INFO(adapter);
    const std::string steps = "steps=120";
    REQUIRE(whole.train({steps}).exit == 0);
    for (const char* moment : {"step:16", "saving:8", "commit:6", "remove:2", "file:20"}) {
      INFO(moment);
      REQUIRE(killed_at(moment, {"-q", "train", cut.recipe(), steps, "--threads", "1"}));
      CHECK(steps_in(cut.folder()) < 115);
    }
    const RunResult last = cut.train({steps});
    INFO(last.err);
    REQUIRE(last.exit == 0);
    CHECK(untimed_metrics(cut.folder()) == untimed_metrics(whole.folder()));
    CHECK(result(cut.folder()) == result(whole.folder()));
  }
}

TEST_CASE("training: Ctrl-C and SIGTERM are acknowledged, save and exit 3, and the same command resumes") {
  for (const int signal : {SIGINT, SIGTERM}) {
    const Run whole, cut;
    std::thread asker([&] {
      while (steps_in(cut.folder()) < 5) std::this_thread::yield();
      ::kill(static_cast<pid_t>(std::stoi(read_file(fs::path(cut.folder()) / "lock"))), signal);
    });
    const RunResult stopped = cut.train({"steps=1000000"});
    asker.join();
    INFO(stopped.err);
    CHECK(stopped.exit == 3);
    CHECK_THAT(stopped.err, Contains("rerun the same command to resume"));
    const std::int64_t step = steps_in(cut.folder());
    CHECK_THAT(stopped.err, Contains(fmt::format("stopping, saving step {}; press Ctrl-C again to stop now\n", step)));
    CHECK_THAT(stopped.err, Contains(fmt::format("interrupted; saved at step {} of 1000000;", step)));
    const std::string more = fmt::format("steps={}", step + 3);
    const RunResult resumed = cut.train({more});
    REQUIRE(resumed.exit == 0);
    CHECK_THAT(resumed.err, Contains(fmt::format("note: resuming at step {} of {}\n", step, step + 3)));
    REQUIRE(whole.train({more}).exit == 0);
    CHECK(untimed_metrics(cut.folder()) == untimed_metrics(whole.folder()));
    CHECK(result(cut.folder()) == result(whole.folder()));
  }
}

TEST_CASE("training: Ctrl-C while the base model is hashed ends at once, and leaves no run folder") {
  const Run cut;
  const pid_t child = start({"-q", "train", cut.recipe()}, [] { ::setenv("TAPETUNE_STOP_AT", "hash:1", 1); });
  int status = 0;
  ::waitpid(child, &status, WUNTRACED);
  REQUIRE(WIFSTOPPED(status));
  ::kill(child, SIGINT);  // pending until it continues
  ::kill(child, SIGCONT);
  ::waitpid(child, &status, 0);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 3);
  CHECK_FALSE(fs::exists(cut.folder()));
}

TEST_CASE("training: a single step is counted as \"1 step\"") {
  const Run one;
  const RunResult trained = one.train({"steps=1"});
  REQUIRE(trained.exit == 0);
  CHECK_THAT(trained.out + trained.err, Contains("1 step"));
  CHECK((trained.out + trained.err).find("1 steps") == std::string::npos);
  const RunResult valid = run({"recipes", "validate", (fs::path(one.folder()) / "recipe.yaml").string()});
  CHECK_THAT(valid.out, Contains("1 step of "));
}

TEST_CASE("training: accumulation of one by four is four at once, to rounding") {
  const Run a, b;
  REQUIRE(a.train({"micro_batch=1"}).exit == 0);
  REQUIRE(b.train({"micro_batch=4"}).exit == 0);
  const auto one = untimed_metrics(a.folder()), four = untimed_metrics(b.folder());
  REQUIRE(one.size() == four.size());
  for (std::size_t i = 0; i < one.size(); ++i) {
    CHECK(std::abs(one[i]["loss"].get<double>() - four[i]["loss"].get<double>()) < 1e-5);
  }
}

TEST_CASE("training: what a run folder refuses") {
  const Run run_;
  REQUIRE(run_.train({"steps=3"}).exit == 0);
  const RunResult other = run_.train({"steps=3", "optimizer.lr=1e-3", "adapter.rank=4"});
  CHECK(other.exit == 1);
  CHECK_THAT(other.err, Contains("a run of another recipe") && Contains("optimizer.lr") && Contains("adapter.rank"));
  CHECK(std::count(other.err.begin(), other.err.end(), '\n') == 1);
  // A longer run of the same recipe is the same run.
  CHECK(run_.train({"steps=5"}).exit == 0);
  CHECK(untimed_metrics(run_.folder()).size() == 5);
  // One bit of one weight makes another model.
  CHECK_THAT(read_file(fs::path(run_.folder()) / "recipe.yaml"), Contains("model_hash: blake3-"));
  std::string bytes = read_file(run_.model / "model.safetensors");
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  write_file(run_.model / "model.safetensors", bytes);
  const RunResult changed = run_.train({"steps=6"});
  CHECK(changed.exit == 1);
  CHECK_THAT(changed.err, Contains("a run of another recipe") && Contains("model_hash"));
  const RunResult held = run_.train({"run=" + run_.folder("other"), "model_hash=blake3-00"});
  CHECK(held.exit == 1);
  CHECK_THAT(held.err, Contains("the recipe's model_hash is blake3-00"));
  CHECK_FALSE(fs::exists(run_.folder("other")));
}

TEST_CASE("training: bad data") {
  const Run run_;
  RunResult refused = run_.train({"context=7000"});
  CHECK(refused.exit == 1);
  CHECK_THAT(refused.err, Contains("7000"));
  refused = run_.train({"data=" + run_.folder("nothing.tokens")});
  CHECK(refused.exit == 1);
  CHECK_THAT(refused.err, Contains("nothing.tokens"));
  Json tokenizer = from_text(read_file(run_.model / "tokenizer.json"));
  tokenizer["model"]["vocab"]["[60]"] = 59;
  tokenizer["model"]["vocab"]["[59]"] = 60;
  write_file(run_.model / "tokenizer.json", to_text(tokenizer));
  refused = run_.train();
  CHECK(refused.exit == 1);
  CHECK_THAT(refused.err, Contains("data.tokens"));
}

TEST_CASE("training: NaN stops the run and keeps the last checkpoint") {
  const Run run_;
  REQUIRE(run_.train({"steps=6"}).exit == 0);
  const fs::path last = fs::path(run_.folder()) / "checkpoints/step-00000006";
  auto adapter = load_tensors(last / "adapter_model.safetensors");
  for (auto& [name, tensor] : adapter) tensor = tensor.clone();
  adapter.at("base_model.model.model.layers.0.self_attn.v_proj.lora_B.weight")[1][1] = NAN;
  save_safetensors(last / "adapter_model.safetensors", adapter, true, {{"format", "pt"}});
  fs::remove(last / "hashes.json");  // as of an earlier version, which saved it like that
  const RunResult stopped = run_.train({"steps=12"});
  CHECK(stopped.exit == 1);
  CHECK_THAT(stopped.err, Contains("step 7: model.layers.0.self_attn.v_proj.lora_B.weight is NaN or Inf") &&
                              Contains("the last good checkpoint is ") && Contains("step-00000003"));
  CHECK(fs::exists(last / "state.json"));
  CHECK_FALSE(fs::exists(fs::path(run_.folder()) / "checkpoints/step-00000012"));

  // NaN in a frozen weight of the base is named.
  const Run poisoned;
  auto tensors = load_tensors(poisoned.model / "model.safetensors");
  for (auto& [name, tensor] : tensors) tensor = tensor.clone();
  tensors.at("model.layers.1.mlp.up_proj.weight")[3][4] = NAN;
  save_safetensors(poisoned.model / "model.safetensors", tensors, true, {{"format", "pt"}});
  const RunResult nan = poisoned.train();
  CHECK(nan.exit == 1);
  CHECK_THAT(nan.err, Contains("the base model's weight model.layers.1.mlp.up_proj.weight has NaN or Inf") &&
                          !Contains("optimizer.lr"));
}

TEST_CASE("training: two processes do not share a run folder") {
  const Run run_;
  const pid_t first = start_training(run_.recipe(), "steps=1000000");
  while (!fs::exists(fs::path(run_.folder()) / "metrics.jsonl")) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  const RunResult second = run_.train({"steps=1000000"});
  CHECK(second.exit == 1);
  CHECK_THAT(second.err, Contains("another process is training in this run folder"));
  ::kill(first, SIGKILL);
  ::waitpid(first, nullptr, 0);
}

TEST_CASE("schedules warm up, stay, and fall") {
  Schedule s;
  s.peak = 1.0;
  s.warmup = 10;
  s.steps = 110;
  CHECK(s.rate(0) == 0);
  CHECK(s.rate(5) == 0.5);
  CHECK(s.rate(10) == 1.0);
  CHECK(s.rate(109) == 1.0);
  s.kind = ScheduleKind::linear;
  CHECK(std::abs(s.rate(60) - 0.5) < 1e-12);
  s.kind = ScheduleKind::cosine;
  s.least = 0.1;
  CHECK(std::abs(s.rate(60) - 0.55) < 1e-12);
  CHECK(std::abs(s.rate(110) - 0.1) < 1e-12);
}

}  // namespace train_test
