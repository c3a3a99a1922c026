// Several ranks compute what one does: for every method, shared in every way; and a run may go on with other numbers of
// them. Real processes over real connections, on this machine.
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <random>
#include <regex>
#include <thread>

#include "catch.h"
#include "checkpoint/writer.h"
#include "core/json.h"
#include "data/token_file.h"
#include "distributed/rank_env.h"
#include "distributed/world.h"
#include "support.h"

namespace ranks_test {

using namespace tapetune;
using namespace tapetune::test;
namespace fs = std::filesystem;

namespace {

struct Setup {
  explicit Setup(const std::string& adapter) {
    tiny_tokens(model, data(), 4000);
    write_file(recipe(),
               fmt::format("model: {}\ndata: {}\ncontext: 16\n{}steps: 20\nbatch: 8\nmicro_batch: 1\n"
                           "optimizer: {{lr: 1.0e-3}}\nsave_every: 0\nheld_out: 0.05\neval_every: 10\neval_windows: 5\n"
                           "dtype: f32\ncheckpointing: full\n",
                           model.path(), data(), adapter));
  }
  std::string data() const { return (model.folder / "data.tokens").string(); }
  std::string recipe() const { return (model.folder / "recipe.yaml").string(); }
  fs::path folder(const std::string& name) const { return model.folder / name; }

  RunResult train(int ranks, const std::string& name, std::vector<std::string> words = {}) const {
    words.insert(words.begin(), {"train", recipe(), "run=" + folder(name).string(), "--timeout", "60"});
    if (ranks > 1) words.insert(words.begin(), {"launch", "--nproc", std::to_string(ranks), "--"});
    return run(words);
  }
  TinyModel model;
};

// Losses to 1e-5, and what was trained to what 20 steps of AdamW make of rounding.
void same_result(const fs::path& run, const fs::path& alone) {
  const std::vector<Json> mine = metrics(run), expected = metrics(alone);
  REQUIRE(mine.size() == expected.size());
  for (std::size_t i = 0; i < mine.size(); ++i) {
    for (const char* key : {"loss", "eval_loss"}) {
      if (!expected[i].contains(key)) continue;
      INFO(to_text(expected[i]) << " alone, " << to_text(mine[i]));
      CHECK(std::abs(mine[i].at(key).get<double>() - expected[i].at(key).get<double>()) < 1e-5);
    }
  }
  const auto tensors = load_tensors(run / "adapter/adapter_model.safetensors");
  for (const auto& [name, value] : load_tensors(alone / "adapter/adapter_model.safetensors")) {
    INFO(name);
    CHECK(largest_difference(value, tensors.at(name)) < 1e-4);
  }
}

const std::vector<std::pair<std::string, std::string>> methods{
    {"lora", "adapter: {method: lora, rank: 4}\ntrain_also: [embeddings, norms]\n"},
    {"longlora", "adapter: {method: longlora, rank: 4, group: 4}\ntrain_also: [embeddings, norms]\n"},
    {"theta-scaling", "adapter: {method: theta-scaling, rank: 4}\n"},
    {"tape", "adapter: {method: tape, rank: 4}\n"}};

}  // namespace

TEST_CASE("ranks: every method gives on several what it gives on one") {
  struct Layout {
    int ranks;
    std::vector<std::string> words;
  };
  const std::vector<Layout> layouts{{2, {}},
                                    {4, {}},
                                    {2, {"shard=base"}},
                                    {2, {"micro_batch=2", "checkpointing=off"}},
                                    {4, {"shard=base"}},
                                    {2, {"sequence_parallel=2", "checkpointing=selective"}},
                                    {4, {"shard=base", "sequence_parallel=2"}}};
  for (const auto& [name, adapter] : methods) {
    const Setup setup(adapter);
    REQUIRE(setup.train(1, "alone").exit == 0);
    for (std::size_t i = 0; i < layouts.size(); ++i) {
      INFO(name << " on " << layouts[i].ranks << " ranks, " << fmt::format("{}", fmt::join(layouts[i].words, " ")));
      const std::string run = fmt::format("run{}", i);
      const RunResult result = setup.train(layouts[i].ranks, run, layouts[i].words);
      INFO(result.err);
      REQUIRE(result.exit == 0);
      same_result(setup.folder(run), setup.folder("alone"));
    }
  }
}

TEST_CASE("ranks: all weights train, and the optimiser's state is shared") {
  const Setup setup("adapter: {method: full}\n");
  REQUIRE(setup.train(1, "alone").exit == 0);
  REQUIRE(setup.train(4, "shared", {"shard=base"}).exit == 0);
  same_result(setup.folder("shared"), setup.folder("alone"));
}

TEST_CASE("ranks: more of them than key and value heads share a sequence") {
  const Setup setup("adapter: {method: tape, rank: 4}\n");
  REQUIRE(setup.train(1, "alone", {"steps=5"}).exit == 0);
  REQUIRE(setup.train(4, "spread", {"steps=5", "sequence_parallel=4"}).exit == 0);
  same_result(setup.folder("spread"), setup.folder("alone"));
}

TEST_CASE("ranks: dropout and random offsets are drawn alike on any number of them and in any micro-batch") {
  for (const std::string adapter : {"{method: lora, rank: 4, dropout: 0.3, targets: [q, v, down, lm_head]}",
                                    "{method: tape, rank: 4, dropout: 0.3, random_offset: true}"}) {
    const Setup setup("adapter: " + adapter + "\n");
    REQUIRE(setup.train(1, "alone", {"steps=5"}).exit == 0);
    REQUIRE(setup.train(1, "at once", {"steps=5", "micro_batch=4"}).exit == 0);
    REQUIRE(setup.train(2, "two", {"steps=5", "micro_batch=4"}).exit == 0);
    REQUIRE(setup.train(4, "spread", {"steps=5", "sequence_parallel=2"}).exit == 0);
    for (const char* run : {"at once", "two", "spread"}) {
      INFO(adapter << ", " << run);
      same_result(setup.folder(run), setup.folder("alone"));
    }
  }
}

TEST_CASE("ranks: micro_batch is a limit, lowered where ranks have fewer sequences") {
  const Setup setup("adapter: {method: lora, rank: 4}\n");
  const std::vector<std::string> words{"steps=3", "batch=4", "micro_batch=4"};
  const RunResult alone = setup.train(1, "alone", words), shared = setup.train(2, "shared", words);
  REQUIRE(alone.exit == 0);
  CHECK_THAT(alone.err, !Contains("micro_batch"));
  INFO(shared.err);
  REQUIRE(shared.exit == 0);
  CHECK_THAT(shared.err, Contains("note: micro_batch 4 is lowered to 2: a batch of 4 gives each rank 2"));
  CHECK_THAT(read_file(setup.folder("shared") / "recipe.yaml"), Contains("\nmicro_batch: 4\n"));
  same_result(setup.folder("shared"), setup.folder("alone"));
  // Two passes either way, of two sequences or of three and one: nothing to tell.
  const RunResult even = setup.train(1, "even", {"steps=3", "batch=4", "micro_batch=3"});
  REQUIRE(even.exit == 0);
  CHECK_THAT(even.err, !Contains("micro_batch"));
}

TEST_CASE("ranks: text is packed once, by one rank") {
  const Setup setup("adapter: {method: lora, rank: 4}\n");
  std::string text;
  for (int i = 0; i < 4000; ++i) text += static_cast<char>('a' + i * i % 23);
  write_file(setup.folder("book.txt"), text);
  const std::vector<std::string> words{"steps=2", "eval_every=0", "data=" + setup.folder("book.txt").string()};
  const RunResult shared = setup.train(2, "shared", words);
  INFO(shared.err);
  REQUIRE(shared.exit == 0);
  const auto said = lines_of(shared.err);
  CHECK(std::count_if(said.begin(), said.end(), [](const auto& line) { return line.starts_with("note: packed "); }) ==
        1);
  REQUIRE(setup.train(1, "alone", words).exit == 0);
  same_result(setup.folder("shared"), setup.folder("alone"));
  CHECK_THAT(setup.train(2, "shared", {"steps=3", words[1], words[2]}).err, !Contains("note: packed"));
}

TEST_CASE("ranks: a run resumes on a different number of ranks") {
  for (const auto& [name, adapter] : methods) {
    if (name != "lora" && name != "tape") continue;
    INFO(name);
    const Setup setup(adapter);
    REQUIRE(setup.train(1, "alone").exit == 0);
    REQUIRE(setup.train(2, "run", {"steps=7", "shard=base", "eval_every=0"}).exit == 0);
    REQUIRE(setup.train(4, "run", {"steps=10", "sequence_parallel=2"}).exit == 0);
    REQUIRE(setup.train(1, "run", {"steps=14", "eval_every=0"}).exit == 0);
    REQUIRE(setup.train(4, "run", {"shard=base"}).exit == 0);
    same_result(setup.folder("run"), setup.folder("alone"));
  }
}

TEST_CASE("ranks: bytes are those of the formulas, and none while gradients accumulate") {
  const Setup setup("adapter: {method: lora, rank: 4}\n");
  const auto sent = [&](int ranks, const std::string& name, const std::vector<std::string>& words) {
    REQUIRE(setup.train(ranks, name, words).exit == 0);
    return metrics(setup.folder(name)).at(1).at("sent_bytes").get<std::int64_t>();
  };
  std::int64_t trained = 0;
  REQUIRE(setup.train(1, "alone", {"steps=1", "eval_every=0"}).exit == 0);
  for (const auto& [name, value] : load_tensors(setup.folder("alone") / "adapter/adapter_model.safetensors")) {
    trained += value.numel() * 4;
  }
  const std::int64_t loss = 16;  // the loss and the wish to stop
  // An all-reduce over R ranks sends 2 (R - 1) / R of its bytes, and each bucket's share is rounded down to whole
  // bytes.
  CHECK(sent(2, "two", {"steps=2", "eval_every=0"}) == trained + loss);
  CHECK(sent(4, "four", {"steps=2", "eval_every=0"}) == (trained + loss) * 3 / 2);
  // Eight sequences a step are four backward passes a rank, or one: as many bytes.
  CHECK(sent(2, "at once", {"steps=2", "eval_every=0", "micro_batch=4"}) == trained + loss);

  // Ulysses: queries, keys and values go and values come back, of half the sequence and half of which stays; forward,
  // again for the gradients, and backward, with a number a head and token besides.
  const std::int64_t layers = 2, heads = 4, kv_heads = 2, width = 16, tokens = 16, batch = 8;
  const std::int64_t exchanged =
      batch * (tokens / 2) * 4 * (width * (heads + 2 * kv_heads + heads) * 3 + heads) / 2 * layers;
  CHECK(sent(2, "spread", {"steps=2", "eval_every=0", "sequence_parallel=2"}) == trained + loss + exchanged);
}

TEST_CASE("ranks: plan says what will be sent") {
  for (const auto& [name, adapter] : methods) {
    const Setup setup(adapter);
    const std::vector<std::pair<int, std::vector<std::string>>> layouts{
        {2, {"checkpointing=off", "sequence_parallel=2"}}, {4, {"shard=base", "sequence_parallel=2"}}};
    for (const auto& [ranks, words] : layouts) {
      INFO(name << " on " << ranks << " ranks");
      std::vector<std::string> command{"plan",       setup.recipe(), "--ranks", std::to_string(ranks),
                                       "--no-probe", "--json"};
      command.insert(command.end(), words.begin(), words.end());
      command.push_back("run=planned");
      double planned = 0;
      const Json plan = from_text(run(command).out);
      for (const auto& [part, bytes] : plan.at("sent_bytes").items()) {
        planned += bytes.get<double>();
      }
      std::vector<std::string> short_run = words;
      short_run.insert(short_run.end(), {"steps=2", "eval_every=0"});
      REQUIRE(setup.train(ranks, fmt::format("run{}", ranks), short_run).exit == 0);
      const auto sent = metrics(setup.folder(fmt::format("run{}", ranks))).at(1).at("sent_bytes").get<double>();
      // Parts are rounded up to whole cache lines, which tiny matrices show.
      CHECK(planned == Approx(sent).epsilon(0.02));
    }
  }
}

namespace {

// A verb on so many ranks, a thread each.
RunResult ranked(int ranks, std::vector<std::string> words) {
  words.insert(words.end(), {"--threads", "1", "--timeout", "60"});
  if (ranks > 1) words.insert(words.begin(), {"launch", "--nproc", std::to_string(ranks), "--"});
  return run(words);
}

Json json_of(const RunResult& result) {
  INFO(result.err);
  REQUIRE(result.exit == 0);
  return from_text(result.out);
}

}  // namespace

TEST_CASE("ranks: evaluations give bit for bit what one process gives") {
  const Setup setup("adapter: {method: tape, rank: 4}\n");
  REQUIRE(setup.train(1, "run", {"steps=3"}).exit == 0);
  const std::string run_folder = setup.folder("run").string();
  const fs::path arc = setup.folder("arc.json");
  std::string questions;
  for (const char* text : {"Why is the sky blue?", "What is wet?", "Who sings at night?", "Where is it?", "When?"}) {
    questions += fmt::format(
        R"({{"question": "{}", "choices": {{"text": ["because of the air", "water"], "label": ["A", "B"]}}, "answerKey": "B"}})"
        "\n",
        text);
  }
  write_file(arc, questions);
  struct Evaluation {
    std::vector<std::string> words;
    const char* found;
  };
  // Five questions and three trials for two or four ranks: in the last round some have nothing to do.
  const std::vector<Evaluation> evaluations{
      {{"eval", "perplexity", run_folder, "--data", setup.data(), "--context", "16,700", "--limit", "3000", "--buckets",
        "4", "--json"},
       "results"},
      {{"eval", "passkey", run_folder, "--context", "350", "--trials", "3", "--json"}, "cells"},
      {{"eval", "choice", run_folder, "--task", "arc", "--data", arc.string(), "--json"}, "results"}};
  for (const Evaluation& each : evaluations) {
    std::vector<std::string> words = each.words;
    const bool details = words[1] != "perplexity";
    if (details) words.insert(words.end(), {"--details", setup.folder("details").string()});
    const Json alone = json_of(ranked(1, words)).at(each.found);
    const std::string alone_details = details ? read_file(setup.folder("details")) : "";
    for (const int ranks : {2, 4}) {
      INFO(words[1] << " on " << ranks << " ranks");
      CHECK(json_of(ranked(ranks, words)).at(each.found) == alone);
      if (details) CHECK(read_file(setup.folder("details")) == alone_details);
    }
  }
}

TEST_CASE("ranks: an evaluation resumes on a different number of ranks") {
  const Setup setup("adapter: {method: lora, rank: 4}\n");
  const auto words = [&](const std::string& contexts, const std::string& kept) {
    return std::vector<std::string>{
        "eval",   "perplexity", setup.model.path(), "--data",   setup.data(),
        "--json", "--context",  contexts,           "--resume", setup.folder(kept).string()};
  };
  const Json alone = json_of(ranked(1, words("16,32", "alone.json"))).at("results");
  REQUIRE(ranked(4, words("16", "kept.json")).exit == 0);
  const Json kept = from_text(read_file(setup.folder("kept.json")));
  CHECK(json_of(ranked(2, words("16,32", "kept.json"))).at("results") == alone);
  // It resumes from what was there: the sums of the first context have not moved.
  CHECK(from_text(read_file(setup.folder("kept.json")))["perplexity"]["contexts"][0] ==
        kept["perplexity"]["contexts"][0]);
}

TEST_CASE("ranks: compare trains and measures together") {
  const Setup setup("adapter: {method: lora, rank: 4}\n");
  write_file(setup.folder("tape.yaml"), std::regex_replace(read_file(setup.recipe()), std::regex("lora"), "tape"));
  write_file(setup.folder("eval.yaml"), "contexts: [16, 32]\npasskey: {contexts: [350], depths: 2, trials: 2}\n");
  const auto compared = [&](int ranks, const std::string& out) {
    const RunResult result = ranked(ranks, {"compare", setup.recipe(), setup.folder("tape.yaml").string(), "steps=6",
                                            "run=unused", "--runs", setup.folder(out + "-runs").string(), "--out",
                                            setup.folder(out).string(), "--eval", setup.folder("eval.yaml").string()});
    INFO(result.err);
    REQUIRE(result.exit == 0);
    return from_text(read_file(setup.folder(out) / "results.json"));
  };
  const Json alone = compared(1, "alone"), shared = compared(2, "shared");
  REQUIRE(shared.at("entries").size() == 3);
  for (std::size_t e = 0; e < 3; ++e) {
    const Json &mine = shared["entries"][e], &expected = alone["entries"][e];
    CHECK(mine.at("passkey") == expected.at("passkey"));
    const Json &rows = mine.at("perplexity").at(0), &expected_rows = expected.at("perplexity").at(0);
    const std::string both = to_text(rows) + " and alone " + to_text(expected_rows);
    INFO(both);
    REQUIRE(rows.size() == 2);
    for (std::size_t i = 0; i < 2; ++i) {
      CHECK(std::abs(rows[i].at("loss").get<double>() - expected_rows[i].at("loss").get<double>()) < 1e-5);
    }
  }
  CHECK(fs::exists(setup.folder("shared") / "report.html"));
}

TEST_CASE("ranks: a broadcast of rank 0 may take longer than the timeout while it sends heartbeats") {
  constexpr std::chrono::seconds timeout{3};
  RankInfo first, second;
  first.ranks = second.ranks = 2;
  second.rank = 1;
  first.port = second.port = 29000 + ::getpid() % 1000;
  std::string heard;
  std::jthread other([&] {  // which is joined also where this one fails
    try {
      World world(second, timeout);
      heard = world.broadcast("");
    } catch (const std::exception& error) {
      heard = error.what();
    }
  });
  {
    World world(first, timeout);
    std::this_thread::sleep_for(2 * timeout);  // as packing a large text
    world.broadcast("packed");
    other.join();
  }
  CHECK(heard == "packed");
}

TEST_CASE("ranks: settings that cannot be shared are refused on rank 0 alone") {
  const Setup setup("adapter: {method: lora, rank: 4}\n");
  const auto refused = [&](int ranks, const std::vector<std::string>& words, const std::string& text) {
    const RunResult result = setup.train(ranks, "run", words);
    INFO(result.err);
    CHECK(result.exit == 1);
    CHECK_THAT(result.err, Contains(text));
    CHECK(std::count(result.err.begin(), result.err.end(), '\n') == 1);
  };
  refused(3, {}, "[train] batch 8 cannot be shared by 3 ranks; set batch to a multiple of 3");
  refused(2, {"sequence_parallel=4"}, "[train] sequence_parallel 4 does not divide the number of ranks, 2");
  refused(3, {"sequence_parallel=3", "batch=9", "micro_batch=9", "context=24"}, "does not divide the model's 4 heads");
  refused(2, {"sequence_parallel=2", "context=15"}, "sequence_parallel 2 does not divide context 15");
  refused(2, {"shard=base", "checkpointing=off"}, "set checkpointing: full or selective");
  refused(2, {"model=nowhere"}, "nowhere");
}

TEST_CASE("ranks: a launcher's environment says who is who") {
  const std::vector<const char*> known{"RANK",
                                       "WORLD_SIZE",
                                       "LOCAL_RANK",
                                       "MASTER_ADDR",
                                       "MASTER_PORT",
                                       "OMPI_COMM_WORLD_RANK",
                                       "OMPI_COMM_WORLD_SIZE",
                                       "OMPI_COMM_WORLD_LOCAL_RANK",
                                       "OMPI_COMM_WORLD_LOCAL_SIZE",
                                       "PMI_RANK",
                                       "PMI_SIZE",
                                       "MPI_LOCALRANKID",
                                       "SLURM_PROCID",
                                       "SLURM_NTASKS",
                                       "SLURM_LOCALID",
                                       "SLURM_JOB_ID",
                                       "SLURM_STEP_NODELIST",
                                       "SLURM_JOB_NODELIST",
                                       "TORCHELASTIC_USE_AGENT_STORE"};
  const auto rank_info = [&](const std::vector<std::pair<const char*, const char*>>& variables) {
    for (const char* name : known) ::unsetenv(name);
    for (const auto& [name, value] : variables) ::setenv(name, value, 1);
    const auto clean = [&] {
      for (const char* name : known) ::unsetenv(name);
    };
    try {
      const RankInfo found = rank_info_from_environment();
      clean();
      return found;
    } catch (...) {
      clean();
      throw;
    }
  };
  CHECK(rank_info({}).ranks == 1);
  const RankInfo torchrun = rank_info({{"RANK", "3"},
                                       {"WORLD_SIZE", "8"},
                                       {"LOCAL_RANK", "1"},
                                       {"MASTER_ADDR", "a.b"},
                                       {"MASTER_PORT", "1234"},
                                       {"TORCHELASTIC_USE_AGENT_STORE", "True"}});
  CHECK((torchrun.rank == 3 && torchrun.ranks == 8 && torchrun.local_rank == 1 && torchrun.served));
  CHECK((torchrun.address == "a.b" && torchrun.port == 1234));
  const RankInfo mpirun = rank_info({{"OMPI_COMM_WORLD_RANK", "1"},
                                     {"OMPI_COMM_WORLD_SIZE", "2"},
                                     {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                     {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}});
  CHECK((mpirun.rank == 1 && mpirun.ranks == 2 && mpirun.address == "127.0.0.1" && !mpirun.served));
  const RankInfo srun = rank_info({{"SLURM_PROCID", "5"},
                                   {"SLURM_NTASKS", "16"},
                                   {"SLURM_LOCALID", "5"},
                                   {"SLURM_JOB_ID", "4711"},
                                   {"SLURM_JOB_NODELIST", "node[03-04,9],other"}});
  CHECK((srun.rank == 5 && srun.ranks == 16 && srun.local_rank == 5 && srun.address == "node03" && srun.port == 30211));
  CHECK(rank_info({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "2"}, {"SLURM_JOB_NODELIST", "a1,b[1-2]"}}).address == "a1");
  CHECK(rank_info({{"PMI_RANK", "1"}, {"PMI_SIZE", "4"}}).ranks == 4);

  CHECK_THROWS_WITH(rank_info({{"RANK", "2"}, {"WORLD_SIZE", "2"}}), Contains("RANK is 2"));
  CHECK_THROWS_WITH(rank_info({{"RANK", "0"}}), Contains("RANK and WORLD_SIZE belong together"));
  CHECK_THROWS_WITH(rank_info({{"RANK", "x"}, {"WORLD_SIZE", "2"}}), Contains("RANK is x"));
  CHECK_THROWS_WITH(rank_info({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", "99999"}}), Contains("MASTER_PORT"));
  CHECK_THROWS_WITH(
      rank_info({{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "4"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}}),
      Contains("MASTER_ADDR is not set"));
}

}  // namespace ranks_test
