// Multiple choice: questions worded as lm-evaluation-harness words them, likelihoods, shares and their errors.
#include "eval/choice.h"

#include <map>

#include "catch.h"
#include "support.h"

namespace choice_test {

using namespace tapetune;
using namespace tapetune::test;
namespace fs = std::filesystem;

namespace {

constexpr const char* mmlu_dev =
    "\" What is two and two?\n\",one,two ,three,four,D\r\n"
    "\"Is \"\"zero\"\" even, or odd?\",even,odd,both,neither,A\r\n";
constexpr const char* mmlu_test =
    "question,choice0,choice1,choice2,choice3,answer\n\"A line,\nand another\",\"a, b\",é, c,d,2\n";
constexpr const char* arc_lines =
    R"({"id": "1", "question": {"stem": "Why is the sky blue? ", "choices": [{"text": "light", "label": "1"}, )"
    R"({"text": "the sea is", "label": "2"}]}, "answerKey": "1"})"
    "\n\n"
    R"({"id": "2", "question": {"stem": "What do bees make?", "choices": [{"text": "honey", "label": "A"}, )"
    R"({"text": "milk", "label": "B"}, {"text": "crème brûlée", "label": "C"}]}, "answerKey": "A"})"
    "\n";
constexpr const char* arc_array =
    R"([{"question": "Why is the sky blue? ", "choices": {"text": ["light", "the sea is"], "label": ["1", "2"]}, )"
    R"("answerKey": "1"}, {"question": "What do bees make?", "choices": {"text": ["honey", "milk", "crème brûlée"], )"
    R"("label": ["A", "B", "C"]}, "answerKey": "A"}])";

// MMLU's folder with two subjects, and ARC in both of its forms.
struct Questions {
  Questions() {
    for (const char* name : {"dev", "test"}) fs::create_directories(folder / "mmlu" / name);
    for (const char* subject : {"abstract_algebra", "virology"}) {
      write_file(folder / "mmlu" / "dev" / fmt::format("{}_dev.csv", subject), mmlu_dev);
      write_file(folder / "mmlu" / "test" / fmt::format("{}_test.csv", subject), mmlu_test);
    }
    write_file(folder / "arc.jsonl", arc_lines);
    write_file(folder / "arc.json", arc_array);
  }
  ChoiceTask mmlu(std::int64_t shots) const {
    ChoiceSource source;
    source.task = "mmlu";
    source.data = folder / "mmlu";
    source.shots = shots;
    return read_task(source);
  }
  ChoiceTask arc(const std::string& file, std::int64_t shots = 0) const {
    ChoiceSource source;
    source.task = "arc";
    source.data = folder / file;
    source.shots = shots;
    if (shots > 0) source.shots_from = folder / "arc.jsonl";
    return read_task(source);
  }
  TempFolder folder;
};

ModelConfig long_config(std::int64_t context) {
  ModelConfig config = random_config(false);
  config.context = context;
  return config;
}

// The tiny tokenizer, with a model in f64 that reads texts of this length.
struct Opened {
  explicit Opened(std::int64_t context = 2048)
      : model(long_config(context), random_weights(long_config(context), at::kDouble), at::kDouble) {}
  // The sum of log p of the last tokens of a text, each given all before it.
  double likely(TokenIds tokens, std::size_t last) const {
    const c10::NoGradGuard evaluation;
    ForwardInput in;
    in.tokens = at::tensor(tokens, at::kLong).unsqueeze(0);
    const at::Tensor all = at::log_softmax(model.logits(model.forward(in).last[0]), -1);
    double sum = 0;
    for (std::size_t i = tokens.size() - last; i < tokens.size(); ++i) {
      sum += all[static_cast<std::int64_t>(i) - 1][tokens[i]].item<double>();
    }
    return sum;
  }
  TinyModel files;
  Tokenizer tokenizer = Tokenizer::open(files.path());
  Llama model;
};

// Every choice by a forward of its own. Fewer tokens than the text has: only the last ones are read.
void check_likelihoods(const Opened& opened, const ChoiceRun& run) {
  const auto context = static_cast<std::size_t>(opened.model.config().longest_context());
  REQUIRE(run.done() == run.total());
  for (std::size_t q = 0; q < run.task().questions.size(); ++q) {
    const ChoiceQuestion& question = run.task().questions[q];
    const std::string text = run.task().parts[question.part].header + question.text;
    REQUIRE(run.log_likelihoods()[q].size() == question.choices.size());
    for (std::size_t c = 0; c < question.choices.size(); ++c) {
      INFO("question " << q << ", choice " << c);
      TokenIds tokens = opened.tokenizer.encode(text + " " + question.choices[c]);
      const std::size_t last = tokens.size() - opened.tokenizer.encode(text).size();
      if (tokens.size() > context + 1)
        tokens.erase(tokens.begin(), tokens.end() - static_cast<std::ptrdiff_t>(context + 1));
      CHECK(std::abs(run.log_likelihoods()[q][c] - opened.likely(tokens, last)) < 1e-9);
    }
  }
}

}  // namespace

TEST_CASE("choice: comma-separated values") {
  const auto cells = [](std::string_view text) {
    std::vector<std::vector<std::string>> rows;
    for (const CsvRow& row : parse_csv(text, "x")) rows.push_back(row.cells);
    return rows;
  };
  using Rows = std::vector<std::vector<std::string>>;
  CHECK(cells("").empty());
  CHECK(cells("a,b\nc,d") == Rows{{"a", "b"}, {"c", "d"}});
  CHECK(cells("a,b\r\nc,d\r\n") == Rows{{"a", "b"}, {"c", "d"}});
  CHECK(cells("\"a,\"\"b\"\"\nc\",d\n") == Rows{{"a,\"b\"\nc", "d"}});
  CHECK(cells(",\n\n\"\",x\n") == Rows{{"", ""}, {"", "x"}});
  CHECK(cells("\xef\xbb\xbf"
              "a,5\" pipe\n") == Rows{{"a", "5\" pipe"}});
  CHECK(parse_csv("\"a\nb\"\nc\n", "x").at(1).line == 3);
  CHECK_THAT(error_of([] { parse_csv("a\nb,\"c\n\n", "file"); }), Contains("file") && Contains("line 2"));
}

// The texts are what lm-evaluation-harness 0.4.13 makes of the same questions.
TEST_CASE("choice: questions are worded as lm-evaluation-harness words them") {
  const Questions files;
  const ChoiceTask mmlu = files.mmlu(2);
  CHECK(mmlu.parts.at(0).name == "abstract_algebra");
  CHECK(mmlu.parts.at(0).group == "STEM");
  CHECK(mmlu.parts.at(1).group == "other");
  REQUIRE(mmlu.questions.size() == 2);
  CHECK(mmlu.parts[0].header + mmlu.questions[0].text ==
        "The following are multiple choice questions (with answers) about abstract algebra.\n\nWhat is two and two?\n"
        "A. one\nB. two \nC. three\nD. four\nAnswer: D\n\nIs \"zero\" even, or odd?\nA. even\nB. odd\nC. both\n"
        "D. neither\nAnswer: A\n\nA line,\nand another\nA. a, b\nB. é\nC.  c\nD. d\nAnswer:");
  CHECK(mmlu.questions[0].choices == std::vector<std::string>{"A", "B", "C", "D"});
  CHECK(mmlu.questions[0].answer == 2);
  for (const char* file : {"arc.jsonl", "arc.json"}) {
    INFO(file);
    const ChoiceTask arc = files.arc(file, 1);
    REQUIRE(arc.questions.size() == 2);
    CHECK(arc.parts.at(0).header + arc.questions[1].text ==
          "Question: Why is the sky blue? \nAnswer: light\n\nQuestion: What do bees make?\nAnswer:");
    CHECK(arc.questions[1].choices == std::vector<std::string>{"honey", "milk", "crème brûlée"});
    CHECK(arc.questions[1].answer == 0);
    CHECK(files.arc(file).parts.at(0).header.empty());
  }
}

TEST_CASE("choice: all of MMLU's subjects have a group") {
  const fs::path path = shared("data/bench/mmlu");
  if (path.empty()) return;
  ChoiceSource source;
  source.task = "mmlu";
  source.data = path;
  const ChoiceTask task = read_task(source);
  CHECK(task.parts.size() == 57);
  CHECK(task.questions.size() == 14042);
  std::map<std::string, int> groups;
  for (const ChoicePart& part : task.parts) ++groups[part.group];
  CHECK(groups == std::map<std::string, int>{{"humanities", 13}, {"social sciences", 12}, {"STEM", 19}, {"other", 13}});
}

TEST_CASE("choice: likelihoods are those of a forward of each choice, and what is shared is computed once") {
  const Questions files;
  const Opened opened;
  for (const ChoiceTask& task : {files.mmlu(2), files.mmlu(0), files.arc("arc.json"), files.arc("arc.json", 2)}) {
    INFO(task.name << ", " << task.shots << " shots");
    ChoiceRun run(opened.model, opened.tokenizer, task);
    finish(run);
    check_likelihoods(opened, run);
    std::int64_t whole = 0, once = 0;
    for (const ChoiceQuestion& question : task.questions) {
      const auto asked = opened.tokenizer.encode(task.parts[question.part].header + question.text).size();
      for (const std::string& choice : question.choices) {
        whole += static_cast<std::int64_t>(asked + opened.tokenizer.encode(" " + choice, false).size() - 1);
        once += static_cast<std::int64_t>(opened.tokenizer.encode(" " + choice, false).size() - 1);
      }
      once += static_cast<std::int64_t>(asked);
    }
    CHECK(run.computed() <= once);
    CHECK(run.computed() < whole);
    CHECK(run.shortened() == 0);
  }
}

TEST_CASE("choice: a log-likelihood that is NaN or Inf stops the run") {
  const Questions files;
  const Opened opened;
  LlamaWeights broken = random_weights(long_config(2048), at::kDouble);
  broken.norm = broken.norm * INFINITY;
  const Llama model(long_config(2048), broken, at::kDouble);
  ChoiceRun run(model, opened.tokenizer, files.arc("arc.json"));
  CHECK_THAT(error_of([&] { finish(run); }), Contains("a log-likelihood is NaN or Inf"));
}

TEST_CASE("choice: what is longer than the context loses its beginning, as in lm-evaluation-harness") {
  const Questions files;
  const Opened opened(40);
  ChoiceRun run(opened.model, opened.tokenizer, files.arc("arc.json", 2));
  finish(run);
  check_likelihoods(opened, run);
  CHECK(run.shortened() == 2);
  const Opened shorter(8);
  CHECK_THAT(error_of([&] {
               ChoiceRun too_short(shorter.model, shorter.tokenizer, files.arc("arc.json"));
               finish(too_short);
             }),
             Contains("context of 8"));
}

TEST_CASE("choice: the most likely choice, and the most likely by character") {
  ChoiceQuestion question;
  question.choices = {"honey", "milk", "crème brûlée"};
  // The last has 12 characters in 15 bytes; by bytes it would win in the second case, too.
  CHECK(chosen(question, {-6.0, -4.1, -11.7}) == std::pair<std::size_t, std::size_t>(1, 2));
  CHECK(chosen(question, {-6.0, -4.9, -14.7}) == std::pair<std::size_t, std::size_t>(1, 0));
  CHECK(chosen(question, {-5.0, -4.0, -12.0}) == std::pair<std::size_t, std::size_t>(1, 0));  // of several the first
}

TEST_CASE("choice: shares, and errors pooled over subjects") {
  const Opened opened;
  ChoiceTask task{"mmlu", 0, {"STEM", "other", "none"}, {{"a", "STEM", {}}, {"b", "STEM", {}}, {"c", "other", {}}}, {}};
  Json likely = Json::array();
  const auto answer = [&](std::size_t part, int right, int of) {
    for (int i = 0; i < of; ++i) {
      task.questions.push_back({part, "which one", {"x", "y"}, 0});
      likely.push_back(i < right ? Json{-1.0, -2.0} : Json{-2.0, -1.0});
    }
  };
  answer(0, 3, 5);
  answer(1, 7, 10);
  answer(2, 1, 2);
  ChoiceRun run(opened.model, opened.tokenizer, task);
  Json state = run.state();
  state["log_likelihoods"] = likely;
  run.restore(state);
  const ChoiceResults results = run.results();
  // From lm-evaluation-harness 0.4.13: mean_stderr of each, pooled_sample_stderr of all.
  CHECK(std::abs(results.parts.at(0).acc - 0.6) < 1e-12);
  CHECK(std::abs(results.parts.at(0).acc_stderr - 0.24494897427831783) < 1e-12);
  CHECK(std::abs(results.parts.at(1).acc_stderr - 0.15275252316519466) < 1e-12);
  CHECK(std::abs(results.parts.at(2).acc_stderr - 0.5) < 1e-12);
  CHECK(results.all.questions == 17);
  CHECK(std::abs(results.all.acc - 11.0 / 17) < 1e-12);
  CHECK(std::abs(results.all.acc_stderr - 0.12635816774004696) < 1e-12);
  CHECK(std::abs(results.all.acc_norm_stderr - 0.12635816774004696) < 1e-12);
  REQUIRE(results.groups.size() == 2);
  CHECK(results.groups[0].name == "STEM");
  CHECK(std::abs(results.groups[0].acc - 10.0 / 15) < 1e-12);
  CHECK(std::abs(results.groups[1].acc_stderr - 0.5) < 1e-12);
}

TEST_CASE("choice: answers that are saved at any moment and resumed from end bit for bit the same") {
  const Questions files;
  const Opened opened;
  for (const ChoiceTask& task : {files.mmlu(2), files.arc("arc.json", 1)}) {
    ChoiceRun whole(opened.model, opened.tokenizer, task);
    finish(whole);
    ChoiceRun cut(opened.model, opened.tokenizer, task);
    cut.take(cut.score(0));
    ChoiceRun again(opened.model, opened.tokenizer, task);
    again.restore(from_text(to_text(cut.state())));
    CHECK(again.done() == 1);
    finish(again);
    CHECK(again.log_likelihoods() == whole.log_likelihoods());
  }
  ChoiceRun run(opened.model, opened.tokenizer, files.mmlu(2));
  run.take(run.score(0));
  const auto refusal = [&](const ChoiceTask& task, const Json& state) {
    ChoiceRun other(opened.model, opened.tokenizer, task);
    return error_of([&] { other.restore(state); });
  };
  CHECK_THAT(refusal(files.mmlu(1), run.state()), Contains("shots was 2, now 1"));
  CHECK_THAT(refusal(files.arc("arc.json"), run.state()), Contains("task was"));
  Json state = run.state();
  state["fingerprint"] = 1.0;
  CHECK_THAT(refusal(files.mmlu(2), state), Contains("another model"));
  state = run.state();
  state["log_likelihoods"][0].push_back(1.0);
  CHECK_THAT(refusal(files.mmlu(2), state), Contains("damaged"));
  state.erase("log_likelihoods");
  CHECK_THAT(refusal(files.mmlu(2), state), Contains("damaged"));
}

TEST_CASE("eval choice prints shares with their errors, by subject and group") {
  const Questions files;
  const TinyModel model;
  const auto eval = [&](std::vector<std::string> words) {
    words.insert(words.begin(), {"eval", "choice", model.path(), "--threads", "1"});
    return run(words);
  };
  const std::string mmlu = (files.folder / "mmlu").string(), arc = (files.folder / "arc.json").string();
  const RunResult table = eval({"--task", "mmlu", "--data", mmlu, "--shots", "2"});
  INFO(table.out << table.err);
  CHECK(table.exit == 0);
  CHECK_THAT(table.out, Contains("2 shots") && Contains("abstract_algebra") && Contains("STEM") && Contains("other") &&
                            Contains("mmlu") && Contains("±") && Contains("2 questions truncated on the left"));
  CHECK_THAT(table.err, Contains("longer than the model's context of 48"));
  const std::vector<std::string> words{"--task",
                                       "arc",
                                       "--data",
                                       arc,
                                       "--json",
                                       "--details",
                                       (files.folder / "all.jsonl").string(),
                                       "--resume",
                                       (files.folder / "kept.json").string()};
  const RunResult first = eval(words), second = eval(words);
  INFO(first.err);
  REQUIRE(first.exit == 0);
  const Json json = from_text(first.out);
  CHECK(json["task"] == "arc");
  CHECK(json["results"]["questions"] == 2);
  CHECK(json["groups"].empty());
  CHECK(json["parts"].size() == 1);
  CHECK(from_text(second.out)["results"] == json["results"]);
  CHECK(from_text(second.out)["tokens_computed"] == 0);
  const std::string details = read_file(files.folder / "all.jsonl");
  const Json line = from_text(details.substr(0, details.find('\n')));
  CHECK(line["prompt"] == "Question: Why is the sky blue? \nAnswer:");
  CHECK(line["log_likelihoods"].size() == 2);
  CHECK(from_text(eval({"--task", "mmlu", "--data", mmlu, "--shots", "0", "--subjects", "virology", "--json"})
                      .out)["results"]["questions"] == 1);
  CHECK(from_text(eval({"--task", "arc", "--data", arc, "--limit", "1", "--json"}).out)["results"]["acc_stderr"]
            .is_null());
}

TEST_CASE("eval choice: bad input is one line that says what to do") {
  const Questions files;
  const TinyModel model;
  const auto path = [&](const std::string& name) { return (files.folder / name).string(); };
  const auto refused = [&](std::vector<std::string> words, const std::string& reason) {
    words.insert(words.begin(), {"eval", "choice", model.path(), "--threads", "1", "--task"});
    const RunResult result = run(words);
    INFO(reason << " in " << result.err);
    CHECK(result.exit == 1);
    CHECK(result.out.empty());
    CHECK_THAT(result.err, Contains(reason));
    CHECK(std::count(result.err.begin(), result.err.end(), '\n') == 1);
  };
  const auto broken = [&](const std::string& text, const std::string& reason) {
    write_file(files.folder / "mmlu/test/virology_test.csv", text);
    refused({"mmlu", "--data", path("mmlu"), "--shots", "2"}, reason);
  };
  refused({"mlu", "--data", path("mmlu")}, "did you mean mmlu?");
  refused({"hellaswag", "--data", path("mmlu")}, "there are mmlu, arc");
  refused({"mmlu", "--data", path("absent")}, "test/SUBJECT_test.csv");
  refused({"mmlu", "--data", path("mmlu"), "--split", "val"}, "val/SUBJECT_val.csv");
  refused({"mmlu", "--data", path("mmlu")}, "has 2 questions, too few for 5");
  refused({"mmlu", "--data", path("mmlu"), "--subjects", "virologie"}, "did you mean virology?");
  refused({"mmlu", "--data", path("mmlu"), "--shots-from", path("arc.json")}, "drop --shots-from");
  broken("a question,one,two,three,A\n", "line 1 has 5 columns, but must have 6");
  broken("a question,one,two,three,four,A\nanother,one,two,three,four,E\n", "line 2 has the answer \"E\"");
  broken("a question,one,two,three,four,\n", "has the answer \"\"");
  broken("", "virology_test.csv: has no question");
  broken("question,choice0,choice1,choice2,choice3,answer\n", "has no question");
  broken("\"a question,one,two,three,four,A\n", "never closed");
  fs::remove(files.folder / "mmlu/test/virology_test.csv");
  write_file(files.folder / "mmlu/test/alchemy_test.csv", mmlu_dev);
  refused({"mmlu", "--data", path("mmlu"), "--shots", "2"}, "not one of MMLU's 57 subjects");
  fs::remove(files.folder / "mmlu/test/alchemy_test.csv");
  fs::remove(files.folder / "mmlu/dev/abstract_algebra_dev.csv");
  refused({"mmlu", "--data", path("mmlu"), "--shots", "2"}, "abstract_algebra_dev.csv");
  refused({"arc", "--data", path("absent.json")}, "absent.json");
  refused({"arc", "--data", path("arc.json"), "--shots", "2"}, "give --shots-from");
  refused({"arc", "--data", path("arc.json"), "--subjects", "x"}, "drop --subjects");
  for (const auto& [text, reason] : std::vector<std::pair<std::string, std::string>>{
           {"", "has no question"},
           {"[]", "has no question"},
           {"{\"question\": ", "line 1"},
           {"{}", "line 1: is not an ARC question"},
           {"\n[1]", "line 2: is not an ARC question"},
           {R"({"question": "x", "choices": {"text": ["a", "b"], "label": ["A", "B"]}})", "answerKey"},
           {R"({"question": "x", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "C"})",
            "none of the labels A, B"},
           {R"({"question": "x", "choices": {"text": ["a", "b", "c"], "label": ["A", "B"]}, "answerKey": "A"})",
            "of 3 choices"}}) {
    write_file(files.folder / "broken.json", text);
    refused({"arc", "--data", path("broken.json")}, reason);
  }
  CHECK(run({"eval", "choice", model.path(), "--task", "arc"}).exit == 2);
  CHECK(run({"eval", "choice", model.path(), "--data", path("arc.json")}).exit == 2);
}

}  // namespace choice_test
