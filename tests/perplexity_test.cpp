// Perplexity: each protocol against its definition, sums that are resumed from, runs and texts as a user gives them.
#include "eval/perplexity.h"

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <random>
#include <thread>

#include "catch.h"
#include "hf/tokenizer.h"
#include "support.h"

namespace perplexity_test {

using namespace tapetune;
using namespace tapetune::test;
namespace fs = std::filesystem;

namespace {

constexpr std::int64_t vocabulary = 61;

std::vector<std::uint32_t> random_tokens(std::int64_t count, unsigned seed = 7) {
  std::mt19937 random(seed);
  std::vector<std::uint32_t> tokens;
  for (std::int64_t i = 0; i < count; ++i) tokens.push_back(3 + random() % 58);
  return tokens;
}

TokenFile write_tokens(const fs::path& path, const std::vector<std::uint32_t>& tokens, std::uint64_t hash = 1) {
  TokenFileInfo info;
  info.vocabulary_hash = hash;
  info.vocabulary_size = vocabulary;
  TokenFileWriter writer(path, true, info);
  writer.append(tokens);
  writer.end_document();
  writer.commit();
  return TokenFile::open(path);
}

// A model in f64, whose losses do not depend on how many windows are computed together, and a text.
struct Text {
  explicit Text(std::int64_t count, unsigned seed = 7)
      : file(write_tokens(folder / "text.tokens", random_tokens(count, seed))) {}
  TokenRange all() const { return {file, 0, file.size()}; }
  TokenRange part(std::int64_t begin, std::int64_t size) const { return {file, begin, size}; }

  // -log p(token t | tokens [begin, t)), for all t of the window of `length` tokens after its first.
  std::vector<double> losses(std::int64_t begin, std::int64_t length) const {
    const c10::NoGradGuard evaluation;
    TokenIds ids(static_cast<std::size_t>(length));
    file.read(begin, ids);
    const at::Tensor row = at::tensor(ids, at::kLong);
    ForwardInput in;
    in.tokens = row.unsqueeze(0);
    const at::Tensor likely = at::log_softmax(model.logits(model.forward(in).last[0]), -1);  // [length, vocabulary]
    std::vector<double> found;
    for (std::int64_t t = 1; t < length; ++t) found.push_back(-likely[t - 1][row[t]].item<double>());
    return found;
  }

  TempFolder folder;
  TokenFile file;
  Llama model{random_config(false), random_weights(random_config(false), at::kDouble), at::kDouble};
};

PerplexityOptions options_for(Protocol protocol, std::int64_t context, std::int64_t stride = -1) {
  PerplexityOptions options;
  options.protocol = protocol;
  options.contexts = {context};
  options.stride = stride;
  return options;
}

ContextPerplexity only(const Text& text, const PerplexityOptions& options, std::optional<TokenRange> range = {}) {
  PerplexityRun run(text.model, range.value_or(text.all()), options);
  return finish(run).at(0);
}

double mean(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return sum / static_cast<double>(values.size());
}

void check_equal(const ContextPerplexity& found, const std::vector<double>& losses, std::int64_t windows) {
  CHECK(found.tokens == static_cast<std::int64_t>(losses.size()));
  CHECK(found.windows == windows);
  CHECK(std::abs(found.loss - mean(losses)) < 1e-12);
  CHECK(std::abs(found.perplexity - std::exp(mean(losses))) < 1e-9);
}

// Bit for bit.
void check_same(const std::vector<ContextPerplexity>& a, const std::vector<ContextPerplexity>& b) {
  REQUIRE(a.size() == b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    CHECK(a[i].context == b[i].context);
    CHECK(a[i].windows == b[i].windows);
    CHECK(a[i].tokens == b[i].tokens);
    CHECK(a[i].loss == b[i].loss);
    REQUIRE(a[i].buckets.size() == b[i].buckets.size());
    for (std::size_t k = 0; k < a[i].buckets.size(); ++k) {
      CHECK(a[i].buckets[k].loss == b[i].buckets[k].loss);
      CHECK(a[i].buckets[k].tokens == b[i].buckets[k].tokens);
    }
  }
}

}  // namespace

TEST_CASE("perplexity: blocks are windows of `context` targets side by side") {
  for (const std::int64_t size : {25, 48, 49, 101}) {
    const Text text(size);
    INFO(size);
    std::vector<double> losses;
    const std::int64_t windows = (size - 1) / 24;
    for (std::int64_t i = 0; i < windows; ++i) {
      const auto own = text.losses(i * 24, 25);
      losses.insert(losses.end(), own.begin(), own.end());
    }
    check_equal(only(text, options_for(Protocol::blocks, 24)), losses, windows);
  }
}

TEST_CASE("perplexity: longlora scores all targets of windows that begin every `stride` tokens") {
  for (const std::int64_t stride : {1, 7, 24}) {
    const Text text(101);
    INFO(stride);
    std::vector<double> losses;
    std::int64_t windows = 0;
    for (std::int64_t begin = 0; begin < 101 - 24; begin += stride, ++windows) {
      const auto own = text.losses(begin, 24);
      losses.insert(losses.end(), own.begin(), own.end());
    }
    check_equal(only(text, options_for(Protocol::longlora, 24, stride)), losses, windows);
  }
}

TEST_CASE("perplexity: sliding scores each token once, with `context` - `stride` others before it or more") {
  for (const std::int64_t size : {25, 26, 49, 101, 102}) {
    for (const std::int64_t stride : {1, 7, 12, 24}) {
      const Text text(size);
      INFO(size << " tokens, stride " << stride);
      std::vector<double> losses;
      std::int64_t windows = 0;
      for (std::int64_t token = 1, begin = 0; token < size; ++token) {
        if (token == 1 || token > begin + 24) {  // past the window's last target: the next one
          if (token > 1) begin = std::min(begin + stride, size - 25);
          ++windows;
        }
        if (token > 24) CHECK(token - begin >= 24 - stride);
        losses.push_back(text.losses(begin, 25).at(static_cast<std::size_t>(token - begin - 1)));
      }
      check_equal(only(text, options_for(Protocol::sliding, 24, stride)), losses, windows);
    }
  }
}

TEST_CASE("perplexity: sliding by whole windows is blocks, and strides have defaults") {
  const Text text(24 * 4 + 1);
  check_same({only(text, options_for(Protocol::sliding, 24, 24))}, {only(text, options_for(Protocol::blocks, 24))});
  CHECK(only(text, options_for(Protocol::sliding, 24)).stride == 12);
  CHECK(only(text, options_for(Protocol::longlora, 24)).stride == 24);
  const Text longer(300);
  CHECK(only(longer, options_for(Protocol::longlora, 280)).stride == 256);
  CHECK(only(longer, options_for(Protocol::longlora, 280)).windows == 1);
}

TEST_CASE("perplexity: windows that are computed together give what they give alone") {
  const Text text(150);
  for (const Protocol protocol : {Protocol::blocks, Protocol::longlora, Protocol::sliding}) {
    INFO(protocol_name(protocol));
    PerplexityOptions options = options_for(protocol, 16, protocol == Protocol::blocks ? -1 : 5);
    options.tokens_at_once = 1;
    const ContextPerplexity alone = only(text, options);
    for (const std::int64_t together : {40, 100000}) {
      options.tokens_at_once = together;
      CHECK(std::abs(only(text, options).loss - alone.loss) < 1e-12);
    }
  }
}

TEST_CASE("perplexity: buckets are places in the window, and average back to the whole") {
  const Text text(101);
  for (const Protocol protocol : {Protocol::blocks, Protocol::longlora, Protocol::sliding}) {
    for (const std::int64_t buckets : {1, 5, 8}) {
      INFO(protocol_name(protocol) << ", " << buckets);
      PerplexityOptions options = options_for(protocol, 24, protocol == Protocol::blocks ? -1 : 7);
      options.buckets = buckets;
      const ContextPerplexity found = only(text, options);
      REQUIRE(found.buckets.size() == static_cast<std::size_t>(buckets));
      CHECK(found.buckets.front().begin == 0);
      CHECK(found.buckets.back().end == (protocol == Protocol::longlora ? 23 : 24));
      double sum = 0;
      std::int64_t tokens = 0;
      for (std::size_t b = 0; b < found.buckets.size(); ++b) {
        if (b > 0) CHECK(found.buckets[b].begin == found.buckets[b - 1].end);
        sum += found.buckets[b].loss * static_cast<double>(found.buckets[b].tokens);
        tokens += found.buckets[b].tokens;
      }
      CHECK(tokens == found.tokens);
      CHECK(std::abs(sum / static_cast<double>(tokens) - found.loss) < 1e-12);
    }
  }
  PerplexityOptions options = options_for(Protocol::blocks, 24);
  options.buckets = 3;
  std::vector<double> second;  // places 8 to 15 of the four windows
  for (std::int64_t i = 0; i < 4; ++i) {
    const auto own = text.losses(i * 24, 25);
    second.insert(second.end(), own.begin() + 8, own.begin() + 16);
  }
  const BucketLoss middle = only(text, options).buckets.at(1);
  CHECK(middle.begin == 8);
  CHECK(middle.end == 16);
  CHECK(middle.tokens == 32);
  CHECK(std::abs(middle.loss - mean(second)) < 1e-12);
}

TEST_CASE("perplexity: a part of a text is that part alone") {
  const Text text(150);
  const Text beginning(60);  // the same seed, so the same first tokens
  const PerplexityOptions options = options_for(Protocol::sliding, 16, 5);
  CHECK(only(text, options, text.part(0, 60)).loss == only(beginning, options).loss);
  CHECK(only(text, options, text.part(90, 60)).loss != only(beginning, options).loss);
  // 149 targets, of which the last 15; or 9 windows of 16, of which the last.
  CHECK(held_out_begin(text.file, 0.1) == 134);
  CHECK(held_out_begin(text.file, 0.1, 16) == 128);
  CHECK(held_out_begin(text.file, 0.001, 16) == 128);
}

TEST_CASE("perplexity: sums that are saved at any moment and resumed from end bit for bit the same") {
  const Text text(101);
  for (const Protocol protocol : {Protocol::blocks, Protocol::longlora, Protocol::sliding}) {
    INFO(protocol_name(protocol));
    PerplexityOptions options = options_for(protocol, 16);
    options.contexts = {16, 32};
    options.buckets = 4;
    options.tokens_at_once = 40;
    PerplexityRun whole(text.model, text.all(), options);
    const auto expected = finish(whole);
    CHECK(whole.done() == whole.total());
    for (int steps = 0;; ++steps) {
      PerplexityRun cut(text.model, text.all(), options);
      for (int i = 0; i < steps; ++i) cut.take(cut.score(0));
      const std::string saved = to_text(cut.state());
      PerplexityRun again(text.model, text.all(), options);
      again.restore(from_text(saved));
      CHECK(again.done() == cut.done());
      check_same(finish(again), expected);
      if (cut.done() == cut.total()) break;
    }
  }
}

TEST_CASE("perplexity: saved sums serve other contexts of the same text, and forget none") {
  const Text text(101);
  PerplexityOptions first = options_for(Protocol::blocks, 16), second = options_for(Protocol::blocks, 32);
  second.contexts = {32, 8};
  PerplexityRun before(text.model, text.all(), first), after(text.model, text.all(), second);
  finish(before);
  after.restore(before.state());
  CHECK(after.done() == 0);
  const auto found = finish(after);
  CHECK(found[0].loss == only(text, options_for(Protocol::blocks, 32)).loss);
  PerplexityRun again(text.model, text.all(), first);
  again.restore(after.state());
  CHECK(again.done() == again.total());
}

TEST_CASE("perplexity: sums of another text, model or protocol are refused") {
  const Text text(101), other(101, 8);
  const PerplexityOptions options = options_for(Protocol::sliding, 16, 5);
  PerplexityRun before(text.model, text.all(), options);
  before.take(before.score(0));
  const auto refusal = [&](const Llama& model, const TokenRange& data, const PerplexityOptions& settings) {
    PerplexityRun run(model, data, settings);
    return error_of([&] { run.restore(before.state()); });
  };
  CHECK(refusal(text.model, text.all(), options) == "no error");
  CHECK_THAT(refusal(text.model, other.all(), options), Contains("tokens_hash"));
  CHECK_THAT(refusal(text.model, text.part(0, 100), options), Contains("tokens was 101, now 100"));
  CHECK_THAT(refusal(text.model, text.all(), options_for(Protocol::longlora, 16, 5)), Contains("protocol"));
  CHECK_THAT(refusal(text.model, text.all(), options_for(Protocol::sliding, 16, 6)), Contains("stride of 5"));
  LlamaWeights changed = random_weights(random_config(false), at::kDouble);
  changed.norm = changed.norm * 1.01;
  const Llama model(random_config(false), changed, at::kDouble);
  CHECK_THAT(refusal(model, text.all(), options), Contains("another model"));
  for (const char* key : {"windows", "tokens", "loss_sum", "first_loss_sum", "bucket_loss_sums", "context"}) {
    INFO(key);
    Json state = before.state();
    state["contexts"][0].erase(key);
    PerplexityRun run(text.model, text.all(), options);
    CHECK_THAT(error_of([&] { run.restore(state); }), Contains("damaged"));
    state = before.state();
    state["contexts"][0][key] = "a word";
    CHECK_THAT(error_of([&] { run.restore(state); }), Contains("damaged"));
    CHECK(run.done() == 0);
  }
}

TEST_CASE("perplexity: settings that allow no window are refused before any work") {
  const Text text(50);
  const auto refusal = [&](const PerplexityOptions& options) {
    return error_of([&] { PerplexityRun(text.model, text.all(), options); });
  };
  CHECK_THAT(refusal(options_for(Protocol::sliding, 16, 0)), Contains("stride is 0"));
  CHECK_THAT(refusal(options_for(Protocol::longlora, 16, 17)), Contains("larger than the context of 16"));
  CHECK_THAT(refusal(options_for(Protocol::blocks, 16, 16)), Contains("no stride"));
  CHECK_THAT(refusal(options_for(Protocol::blocks, 1)), Contains("must be 2 or more"));
  CHECK_THAT(refusal(options_for(Protocol::blocks, 50)), Contains("needs 51") && Contains("at most 49"));
  CHECK(refusal(options_for(Protocol::longlora, 49)) == "no error");
  PerplexityOptions options = options_for(Protocol::blocks, 16);
  options.buckets = 16;
  CHECK_THAT(refusal(options), Contains("16 buckets"));
  options = options_for(Protocol::blocks, 16);
  options.contexts = {16, 8, 16};
  CHECK_THAT(refusal(options), Contains("twice"));
  options.contexts = {};
  CHECK_THAT(refusal(options), Contains("no context"));
  CHECK_THAT(error_of([] { parse_protocol("slidding"); }), Contains("did you mean sliding?"));
  CHECK_THAT(error_of([&] { held_out_begin(text.file, 1.0); }), Contains("below 1"));
}

TEST_CASE("perplexity: a model whose losses are NaN is reported") {
  const Text text(50);
  for (const double factor : {NAN, INFINITY}) {
    LlamaWeights broken = random_weights(random_config(false), at::kFloat);
    broken.norm = broken.norm * factor;
    const Llama model(random_config(false), broken, at::kFloat);
    PerplexityRun run(model, text.all(), options_for(Protocol::blocks, 16));
    CHECK_THAT(error_of([&] { run.take(run.score(0)); }), Contains("is NaN or Inf"));
    CHECK(run.done() == 0);
  }
}

// --- the verb
// ---------------------------------------------------------------------------------------------------------

namespace {

// The tiny checkpoint, and files to evaluate it on.
struct Files {
  Files() { write_tokens(data(), random_tokens(600), read_vocabulary(model.folder / "m").hash); }
  std::string data() const { return path("text.tokens"); }
  std::string path(const std::string& name) const { return (model.folder / name).string(); }

  RunResult eval(std::vector<std::string> words, const std::string& folder = "") const {
    words.insert(words.begin(), {"eval", "perplexity", folder.empty() ? model.path() : folder, "--threads", "1"});
    return run(words);
  }
  Json json(std::vector<std::string> words, const std::string& folder = "") const {
    words.emplace_back("--json");
    const RunResult result = eval(words, folder);
    INFO(result.err);
    REQUIRE(result.exit == 0);
    return from_text(result.out);
  }
  Json losses(const std::vector<std::string>& words, const std::string& folder = "") const {
    return json(words, folder)["results"];
  }
  TinyModel model;
};

std::string train(const Files& files, const std::string& recipe) {
  write_file(files.path("recipe.yaml"), recipe + fmt::format("data: {}\nrun: {}\ncontext: 32\nsteps: 4\nbatch: 2\n"
                                                             "held_out: 0.2\neval_every: 4\ndtype: f32\n",
                                                             files.data(), files.path("run")));
  const RunResult done = run({"train", files.path("recipe.yaml"), "--threads", "1"});
  INFO(done.err);
  REQUIRE(done.exit == 0);
  return files.path("run");
}

double trained_loss(const std::string& folder) {
  const std::string text = read_file(fs::path(folder) / "metrics.jsonl");
  const std::size_t begin = text.rfind('\n', text.size() - 2) + 1;
  return from_text(text.substr(begin))["eval_loss"].get<double>();
}

}  // namespace

TEST_CASE("eval perplexity prints a table that names its protocol and marks what is beyond the context") {
  const Files files;
  const RunResult table = files.eval({"--data", files.data(), "--context", "16,64", "--buckets", "4"});
  INFO(table.out << table.err);
  CHECK(table.exit == 0);
  CHECK_THAT(table.out, Contains("protocol sliding") && Contains("16 ") && Contains("64*") &&
                            Contains("* longer than the model's context of 48") && Contains("loss by position"));
  CHECK_THAT(table.err, Contains("a context of 64 is longer than the model's context of 48"));
  CHECK(files.eval({"--data", files.data(), "--context", "16"}).err.empty());
  const Json json = files.json({"--data", files.data(), "--context", "16,64", "--buckets", "4"});
  CHECK(json["protocol"] == "sliding");
  CHECK(json["tokens"] == 600);
  CHECK(json["results"][0]["context"] == 16);
  CHECK(json["results"][0]["tokens"] == 599);
  CHECK(json["results"][0]["beyond_context"] == false);
  CHECK(json["results"][1]["beyond_context"] == true);
  CHECK(json["results"][1]["buckets"].size() == 4);
  CHECK(std::abs(std::exp(json["results"][0]["loss"].get<double>()) - json["results"][0]["perplexity"].get<double>()) <
        1e-9);
  CHECK(files.losses({"--data", files.data()})[0]["context"] == 48);  // the model's own
}

TEST_CASE("eval perplexity takes the first tokens, the last part, 16-bit tokens and text") {
  const Files files;
  const std::vector<std::string> settings{"--context", "16", "--protocol", "blocks"};
  const auto with = [&](std::vector<std::string> words) {
    words.insert(words.end(), settings.begin(), settings.end());
    return files.losses(words);
  };
  const auto tokens = random_tokens(600);
  const Json whole = with({"--data", files.data()});
  const std::uint64_t hash = read_vocabulary(files.model.folder / "m").hash;
  write_tokens(files.path("first.tokens"), {tokens.begin(), tokens.begin() + 100}, hash);
  CHECK(with({"--data", files.data(), "--limit", "100"}) == with({"--data", files.path("first.tokens")}));
  write_tokens(files.path("last.tokens"), {tokens.begin() + 479, tokens.end()}, hash);  // the last 120 of 599 targets
  CHECK(with({"--data", files.data(), "--split", "held-out", "--held-out", "0.2"}) ==
        with({"--data", files.path("last.tokens")}));
  {
    std::ofstream raw(files.path("raw.bin"), std::ios::binary);
    for (const std::uint32_t token : tokens) {
      const auto narrow = static_cast<std::uint16_t>(token);
      raw.write(reinterpret_cast<const char*>(&narrow), sizeof(narrow));
    }
  }
  CHECK(with({"--data", files.path("raw.bin")}) == whole);
  std::string text;
  for (int i = 0; i < 30; ++i) text += "the quick brown fox ";
  write_file(files.path("text.txt"), text);
  REQUIRE(run({"data", "pack", files.path("text.txt"), "--model", files.model.path(), "--eos", "none", "--out",
               files.path("packed.tokens")})
              .exit == 0);
  CHECK(with({"--data", files.path("text.txt")}) == with({"--data", files.path("packed.tokens")}));
}

TEST_CASE("eval perplexity of a run is that of its model with its adapter, and of its own held-out windows") {
  const Files files;
  const std::string folder = train(files, fmt::format("model: {}\nadapter: {{method: lora, rank: 2}}\n"
                                                      "optimizer: {{lr: 0.05}}\n",
                                                      files.model.path()));
  const std::vector<std::string> words{"--data",     files.data(), "--context", "32",
                                       "--protocol", "blocks",     "--split",   "held-out"};
  const Json found = files.json(words, folder);
  CHECK(found["first_token"] == 18 * 32 - 4 * 32);  // 18 windows, 4 of them held out
  CHECK(std::abs(found["results"][0]["loss"].get<double>() - trained_loss(folder)) < 1e-6);
  const Json whole = files.losses({"--data", files.data(), "--context", "32"}, folder);
  CHECK(whole == files.losses({"--data", files.data(), "--context", "32", "--adapter", folder + "/adapter"}));
  CHECK(whole != files.losses({"--data", files.data(), "--context", "32"}));

  fs::remove_all(fs::path(folder) / "adapter");
  const RunResult unfinished = files.eval({"--data", files.data(), "--context", "32", "--json"}, folder);
  CHECK_THAT(unfinished.err, Contains("not finished") && Contains("step 4"));
  CHECK(from_text(unfinished.out)["results"] == whole);
  CHECK_THAT(files.eval({"--data", files.data(), "--method", "tape"}, folder).err, Contains("drop --method"));
  fs::remove_all(fs::path(folder) / "checkpoints");
  const RunResult nothing = files.eval({"--data", files.data()}, folder);
  CHECK(nothing.exit == 1);
  CHECK_THAT(nothing.err, Contains("neither a result") && Contains("nor a checkpoint"));
}

TEST_CASE("eval perplexity of a run from scratch finds its weights in the run") {
  const Files files;
  const std::string folder =
      train(files, fmt::format("model: {{init: random, hidden: 32, layers: 2, heads: 4, ffn: 48, vocab: 61, "
                               "tokenizer: {}}}\noptimizer: {{lr: 0.01}}\n",
                               files.model.path()));
  const Json found = files.losses({"--data", files.data(), "--protocol", "blocks", "--split", "held-out"}, folder);
  CHECK(found[0]["context"] == 32);
  CHECK(std::abs(found[0]["loss"].get<double>() - trained_loss(folder)) < 1e-6);
}

TEST_CASE("eval perplexity resumes from its file, and refuses that of another model") {
  const Files files;
  const std::vector<std::string> words{"--data",   files.data(), "--context", "16,32",
                                       "--stride", "4",          "--resume",  files.path("sums.json")};
  const Json expected = files.losses(words);
  Json kept = from_text(read_file(files.path("sums.json")));
  CHECK(kept["perplexity"]["contexts"][1]["loss_sum"].get<double>() /
            kept["perplexity"]["contexts"][1]["tokens"].get<double>() ==
        expected[1]["loss"].get<double>());
  // As if it had been cut off after the first context.
  kept["perplexity"]["contexts"].erase(1);
  write_file(files.path("sums.json"), to_text(kept));
  CHECK(files.losses(words) == expected);
  CHECK(from_text(read_file(files.path("sums.json")))["perplexity"]["contexts"].size() == 2);
  const auto refused = [&](const std::vector<std::string>& more, const std::string& reason) {
    std::vector<std::string> all = words;
    all.insert(all.end(), more.begin(), more.end());
    const RunResult result = files.eval(all);
    CHECK(result.exit == 1);
    CHECK_THAT(result.err, Contains(reason));
  };
  refused({"--method", "lora"}, "holds results of");
  refused({"--dtype", "f64"}, "in float32");
  refused({"--limit", "500"}, "tokens was 600, now 500");
  write_file(files.path("sums.json"), "{}");
  refused({}, "does not hold results of eval perplexity");
  write_file(files.path("sums.json"), "{\"tapetune\": ");
  refused({}, "sums.json");
  fs::remove(files.path("sums.json"));
  fs::create_directory(files.path("sums.json"));
  refused({}, "is a folder");
}

TEST_CASE("eval perplexity that is interrupted exits with 3, and the same command ends with the same numbers") {
  const Files files;
  write_tokens(files.path("long.tokens"), random_tokens(12000), read_vocabulary(files.model.folder / "m").hash);
  const std::vector<std::string> words{"--data", files.path("long.tokens"), "--context", "32", "--stride", "1"};
  std::vector<std::string> kept = words;
  kept.insert(kept.end(), {"--resume", files.path("sums.json")});
  std::vector<std::string> command{"eval", "perplexity", files.model.path(), "--threads", "1", "-q"};
  command.insert(command.end(), kept.begin(), kept.end());
  const pid_t child = start(command, [&] { redirect(files.path("said"), stderr); });
  wait_for_handler(child, SIGINT);
  ::kill(child, SIGINT);
  int status = 0;
  ::waitpid(child, &status, 0);
  REQUIRE(WIFEXITED(status));
  INFO(read_file(files.path("said")));
  CHECK(WEXITSTATUS(status) == 3);
  CHECK_THAT(read_file(files.path("said")), Contains("interrupted"));
  CHECK(files.losses(kept) == files.losses(words));
}

TEST_CASE("eval perplexity: bad input is one line that says what to do") {
  const Files files;
  const auto refused = [&](std::vector<std::string> words, const std::string& reason, const std::string& folder = "") {
    if (words.empty() || words[0] != "--data") words.insert(words.begin(), {"--data", files.data()});
    const RunResult result = files.eval(words, folder);
    INFO(reason << " in " << result.err);
    CHECK(result.exit == 1);
    CHECK(result.out.empty());
    CHECK_THAT(result.err, Contains(reason));
    CHECK(std::count(result.err.begin(), result.err.end(), '\n') == 1);
  };
  refused({"--protocol", "block"}, "did you mean blocks?");
  refused({"--context", "16", "--stride", "0"}, "stride is 0");
  refused({"--context", "16", "--stride", "17"}, "larger than the context");
  refused({"--context", "16", "--stride", "8", "--protocol", "blocks"}, "drop --stride");
  refused({"--context", "600"}, "too few for one window of context 600");
  refused({"--context", "16", "--limit", "16"}, "too few");
  refused({"--context", "16", "--split", "held-out", "--held-out", "1"}, "below 1");
  write_file(files.path("empty.txt"), "");
  refused({"--data", files.path("empty.txt")}, "no text");
  write_file(files.path("empty.tokens"), "");
  refused({"--data", files.path("empty.tokens")}, "is empty");
  write_file(files.path("empty.bin"), "");
  refused({"--data", files.path("empty.bin")}, "is empty");
  refused({"--data", files.path("absent.tokens")}, "absent.tokens");
  refused({"--data", files.path("absent.txt")}, "absent.txt");
  write_file(files.path("words.tokens"), "these are words, and not tokens at all");
  refused({"--data", files.path("words.tokens")}, "is not a token file");
  write_tokens(files.path("other.tokens"), random_tokens(600), 5);
  refused({"--data", files.path("other.tokens")}, "another tokenizer");
  write_file(files.path("large.bin"), std::string(200, '\x7f'));
  refused({"--data", files.path("large.bin"), "--context", "16"}, "its vocabulary has 61");
  fs::create_directory(files.path("nothing"));
  refused({}, "neither a checkpoint", files.path("nothing"));
  refused({}, "no such folder", files.path("absent"));
  fs::remove(files.model / "tokenizer.json");
  write_file(files.path("text.txt"), "the quick brown fox");
  refused({"--data", files.path("text.txt")}, "tokenizer.json");
  CHECK(files.eval({"--data", files.data(), "--context", "0.5"}).exit == 2);
  CHECK(files.eval({"--context", "16"}).exit == 2);
  CHECK(run({"eval"}).exit == 2);
}

}  // namespace perplexity_test
