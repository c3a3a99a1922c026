// Pass keys: the papers' prompts, what counts as an answer, and prompts that share what they begin with.
#include "eval/passkey.h"

#include "adapters/build_model.h"
#include "catch.h"
#include "support.h"

namespace passkey_test {

using namespace tapetune;
using namespace tapetune::test;
namespace fs = std::filesystem;

namespace {

at::Tensor whole(const Llama& model, const TokenIds& tokens, std::int64_t planned) {
  const c10::NoGradGuard evaluation;
  ForwardInput in;
  in.tokens = at::tensor(tokens, at::kLong).unsqueeze(0);
  in.planned_length = planned;
  return model.forward(in).last[0];
}

// Reads texts that share beginnings of every length, and compares each with a forward of its own.
void check_reader(const Llama& model, double tolerance) {
  const TokenIds a{3, 14, 15, 9, 26, 5, 35, 8}, b{3, 14, 15, 9, 2, 6, 5}, c{3, 14, 15}, d{9, 9};
  PrefixReader reader(model, 16);
  std::int64_t computed = 0;
  const auto check = [&](const TokenIds& text, std::int64_t planned, std::int64_t fresh, std::int64_t keep = 100) {
    const at::Tensor found = reader.read(text, planned, keep);
    const auto length = static_cast<std::int64_t>(text.size());
    CHECK(found.size(0) == fresh);
    CHECK(largest_difference(found, whole(model, text, planned).narrow(0, length - fresh, fresh)) < tolerance);
    computed += fresh;
    CHECK(reader.computed() == computed);
  };
  check(a, 12, 8);
  check(b, 12, 3);
  check(b, 12, 1);     // the same again: its last token
  check(c, 12, 1);     // a part of it
  check(a, 12, 5);     // from where that ended
  check(a, 12, 6, 2);  // no more than two tokens are taken from before
  check(d, 12, 2);
  check(a, 12, 8);
}

}  // namespace

TEST_CASE("passkey: prompts are what the papers draw with numpy") {
  struct Case {
    std::int64_t garbage;
    std::uint32_t seed;
    std::int64_t before;
    const char* key;
  };
  // From numpy.random.seed(seed), randint(0, garbage), randint(1, 50000).
  for (const Case& one :
       {Case{3072, 0, 2732, "43568"}, Case{3072, 3, 1898, "1689"}, Case{3072, 123, 1346, "15378"},
        Case{29696, 1, 235, "12173"}, Case{1, 5, 0, "35684"}, Case{10240, 4294967295, 290, "44104"}}) {
    INFO(one.garbage << " characters, seed " << one.seed);
    const PasskeyPrompt prompt = passkey_prompt(one.garbage, one.seed);
    CHECK(prompt.before == one.before);
    CHECK(prompt.key == one.key);
  }
  const PasskeyPrompt prompt = passkey_prompt(100, 0, 0.2);
  CHECK(prompt.before == 20);
  CHECK(prompt.key == passkey_prompt(100, 0).key);
  CHECK(prompt.text ==
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you "
        "about the important information there.\nThe grass is green. \nThe pass key is " +
            prompt.key + ". Remember it. " + prompt.key +
            " is the pass key.\nThe grass is green. The sky is blue. The sun is yellow. Here we go. There and ba\n"
            "What is the pass key? The pass key is");
}

TEST_CASE("passkey: the papers' lengths") {
  CHECK(paper_lengths(1000, 8192) == std::vector<std::int64_t>{3072, 7168, 10240, 14336, 18432, 21504, 25600, 29696});
  CHECK(paper_lengths(1000, 32768).size() == 32);
  CHECK(paper_lengths(1000, 32768).back() == 119808);
  CHECK_THAT(error_of([] { paper_lengths(273, 8192); }), Contains("274 or more"));
  CHECK_THAT(error_of([] { paper_lengths(1000, 999); }), Contains("gives no prompt"));
}

TEST_CASE("passkey: a tokenizer unlike Llama 2's is compared by text") {
  const TinyModel model;
  const Tokenizer tokenizer = Tokenizer::open(model.path());
  const PasskeyJudge judge(tokenizer);
  CHECK(!judge.by_ids());
  CHECK(judge.tokens("123") == 4);  // with the space before it
  const auto says = [&](const std::string& answer) {
    return judge.is_correct(tokenizer.encode(answer, /*special=*/false), "123");
  };
  CHECK(says(" 123"));
  CHECK(says("123."));
  CHECK(says("  123"));
  CHECK(!says("1234"));
  CHECK(!says(" 12"));
  CHECK(!says(" is 123"));
  CHECK(!says(""));
}

TEST_CASE("passkey: Llama 2's tokenizer is compared by ids, as the papers do") {
  const fs::path folder = shared("data/llama2-tokenizer");
  if (folder.empty()) return;
  const Tokenizer tokenizer = Tokenizer::open(folder);
  const PasskeyJudge judge(tokenizer);
  CHECK(judge.by_ids());
  CHECK(judge.tokens("31415") == 6);
  CHECK(judge.is_correct({29871, 29896, 29906, 29941}, "123"));
  CHECK(!judge.is_correct({29896, 29906, 29941}, "123"));
  CHECK(!judge.is_correct({29871, 29896, 29906}, "123"));
}

TEST_CASE("a reader of texts that begin alike gives what a forward of each gives") {
  const ModelConfig config = random_config(false);
  for (const auto& [dtype, tolerance] : {std::pair(at::kDouble, 1e-10), std::pair(at::kFloat, 2e-5)}) {
    INFO(at::toString(dtype));
    const LlamaWeights weights = random_weights(config, dtype);
    check_reader(Llama(config, weights, dtype), tolerance);
    // TAPE's positions are in the cache as well.
    AdaptedModel tape = adapt(config, weights, parse_method("tape", {}), dtype, 1);
    for (Parameter& p : tape.parameters) {
      const c10::NoGradGuard draw;
      p.value.add_(at::randn(p.value.sizes(), at::kDouble).to(p.value.scalar_type()), 0.05);
    }
    check_reader(tape.model, tolerance);
  }
}

TEST_CASE("a reader starts over where the planned length changes the frequencies") {
  ModelConfig config = random_config(false);
  config.context = 8;
  config.rope.type = RopeType::dynamic;
  config.rope.factor = 2;
  const Llama model(config, random_weights(config, at::kDouble), at::kDouble);
  const TokenIds text{3, 14, 15, 9, 26};
  PrefixReader reader(model, 32);
  reader.read(text, 6);
  CHECK(reader.read(text, 8).size(0) == 1);  // within the context all are the same
  const at::Tensor longer = reader.read(text, 20);
  CHECK(longer.size(0) == 5);
  CHECK(largest_difference(longer, whole(model, text, 20)) < 1e-10);
  CHECK(largest_difference(longer, whole(model, text, 8)) > 1e-6);
  CHECK_THAT(error_of([&] { reader.read(TokenIds(33, 5), 33); }), Contains("the cache was made for 32"));
  CHECK(reader.read(text, 20).size(0) == 5);  // what failed left nothing behind
}

namespace {

PasskeyOptions small_grid() {
  PasskeyOptions options;
  options.contexts = {400, 500};
  options.depths = {0, 0.5, 1};
  options.trials = 2;
  return options;
}

struct Opened {
  TinyModel files;
  Tokenizer tokenizer = Tokenizer::open(files.path());
  Checkpoint checkpoint = Checkpoint::open(files.path());
  Llama model = Llama::open(checkpoint, at::kFloat);
};

}  // namespace

TEST_CASE("passkey: a grid has a cell for each length and depth, within the context that was asked for") {
  const Opened opened;
  PasskeyRun run(opened.model, opened.tokenizer, small_grid());
  const auto cells = finish(run);
  REQUIRE(cells.size() == 6);
  for (std::size_t i = 0; i < cells.size(); ++i) {
    CHECK(cells[i].context == (i < 3 ? 400 : 500));
    CHECK(cells[i].depth == 0.5 * static_cast<double>(i % 3));
    CHECK(cells[i].trials == 2);
    CHECK(cells[i].longest <= *cells[i].context);
    CHECK(cells[i].tokens > static_cast<double>(*cells[i].context - 12));
    CHECK(cells[i].garbage == cells[i - i % 3].garbage);
  }
  CHECK(run.done() == 12);
  CHECK(run.total() == 12);
}

TEST_CASE("passkey: answers are those of plain generation, and prompts share what they begin with") {
  const Opened opened;
  PasskeyOptions options = small_grid();
  options.depths = {};
  options.trials = 4;
  PasskeyRun run(opened.model, opened.tokenizer, options);
  finish(run);
  std::int64_t read = 0;
  for (const PasskeyTrial& trial : run.trials()) {
    TokenIds text = opened.tokenizer.encode_prompt(run.prompt(trial).text);
    CHECK(static_cast<std::int64_t>(text.size()) == trial.tokens);
    REQUIRE(trial.answer);
    for (const std::int64_t token : *trial.answer) {
      const at::Tensor logits = opened.model.logits(whole(opened.model, text, 0)[-1]);
      CHECK(logits.max().item<float>() - logits[token].item<float>() < 1e-4F);
      text.push_back(token);
    }
    read += static_cast<std::int64_t>(text.size()) - 1;
  }
  CHECK(run.read() == read);
  CHECK(run.computed() < read * 3 / 4);
}

TEST_CASE("passkey: answers that are kept at any moment are not asked for again") {
  const Opened opened;
  const PasskeyOptions options = small_grid();
  PasskeyRun whole_run(opened.model, opened.tokenizer, options);
  finish(whole_run);
  PasskeyRun cut(opened.model, opened.tokenizer, options);
  for (int i = 0; i < 5; ++i) cut.take(cut.score(0));
  PasskeyRun again(opened.model, opened.tokenizer, options);
  again.restore(from_text(to_text(cut.state())));
  CHECK(again.done() == 5);
  finish(again);
  CHECK(again.state() == whole_run.state());
  PasskeyOptions other = options;
  other.depths = {0.5, 0.75};
  PasskeyRun more(opened.model, opened.tokenizer, other);
  more.restore(again.state());
  CHECK(more.total() == 8);
  CHECK(more.state()["trials"].size() == 12);  // nothing is forgotten

  Json state = cut.state();
  state["fingerprint"] = state["fingerprint"].get<double>() * 1.001;
  CHECK_THAT(error_of([&] { PasskeyRun(opened.model, opened.tokenizer, options).restore(state); }),
             Contains("another model"));
  for (const char* key : {"trial", "answer"}) {
    state = cut.state();
    state["trials"][0].erase(key);
    CHECK_THAT(error_of([&] { PasskeyRun(opened.model, opened.tokenizer, options).restore(state); }),
               Contains("damaged"));
  }
}

TEST_CASE("eval passkey prints a table or a grid, and marks what is beyond the context") {
  const TinyModel model;
  const auto eval = [&](std::vector<std::string> words) {
    words.insert(words.begin(), {"eval", "passkey", model.path(), "--threads", "1"});
    return run(words);
  };
  const RunResult table = eval({"--interval", "300", "--max-tokens", "600", "--trials", "2"});
  INFO(table.out << table.err);
  CHECK(table.exit == 0);
  CHECK_THAT(table.out, Contains("2 trials for each length, seeds from 0\nanswers compared as text") &&
                            Contains("1024") && Contains("2048") && Contains("*") &&
                            Contains("longer than the model's context of 48"));
  CHECK_THAT(table.err, Contains("longer than the model's context of 48"));
  const RunResult grid = eval({"--context", "350,400", "--depths", "0,0.5,1", "--trials", "1"});
  CHECK_THAT(grid.out, Contains("1 trial for each length and depth") && Contains("tokens     0   0.5     1"));
  const std::vector<std::string> words{"--context",
                                       "350",
                                       "--trials",
                                       "2",
                                       "--seed",
                                       "7",
                                       "--json",
                                       "--details",
                                       (model.folder / "trials.jsonl").string(),
                                       "--resume",
                                       (model.folder / "kept.json").string()};
  const RunResult first = eval(words), second = eval(words);
  REQUIRE(first.exit == 0);
  const Json json = from_text(first.out);
  CHECK(json["seed"] == 7);
  CHECK(json["matched"] == "text");
  CHECK(json["cells"].size() == 1);
  CHECK(json["cells"][0]["asked"] == 350);
  CHECK(json["cells"][0]["trials"] == 2);
  CHECK(json["cells"][0]["depth"].is_null());
  CHECK(json["cells"][0]["beyond_context"] == true);
  CHECK(json["tokens_computed"].get<std::int64_t>() < json["tokens_read"].get<std::int64_t>());
  CHECK(from_text(second.out)["cells"] == json["cells"]);
  CHECK(from_text(second.out)["tokens_computed"] == 0);
  const std::string details = read_file(model.folder / "trials.jsonl");
  CHECK(std::count(details.begin(), details.end(), '\n') == 2);
  CHECK(from_text(details.substr(0, details.find('\n')))["prompt_tokens"].size() > 300);
}

TEST_CASE("eval passkey: bad input is one line that says what to do") {
  const TinyModel model;
  const auto refused = [&](std::vector<std::string> words, const std::string& reason) {
    words.insert(words.begin(), {"eval", "passkey", model.path(), "--threads", "1"});
    const RunResult result = run(words);
    INFO(reason << " in " << result.err);
    CHECK(result.exit == 1);
    CHECK(result.out.empty());
    CHECK_THAT(result.err, Contains(reason));
    CHECK(std::count(result.err.begin(), result.err.end(), '\n') == 1);
  };
  refused({"--context", "100"}, "is too short: the prompt alone");
  refused({"--context", "400,400"}, "given twice");
  refused({"--context", "400", "--depths", "0,1.5"}, "must be 0 to 1");
  refused({"--context", "400", "--depths", "0.5,0.5"}, "given twice");
  refused({"--interval", "100"}, "274 or more");
  refused({"--trials", "2", "--seed", "4294967295"}, "largest seed");
  write_file(model.folder / "words", "words");
  refused({"--context", "400", "--trials", "1", "--resume", (model.folder / "words").string()}, "words");
  refused({"--context", "400", "--details", (model.folder / "absent" / "x").string()}, "absent");
  fs::remove(model / "tokenizer.json");
  refused({"--context", "400"}, "tokenizer.json");
  CHECK(run({"eval", "passkey", model.path(), "--context", "400", "--interval", "500"}).exit == 2);
  CHECK(run({"eval", "passkey", model.path(), "--trials", "0"}).exit == 2);
}

}  // namespace passkey_test
