// Files cannot make a terminal do anything: what they contain is printed with control characters escaped.
#include <sys/wait.h>
#include <unistd.h>

#include "catch.h"
#include "core/escape.h"
#include "core/json.h"
#include "data/token_file.h"
#include "data/vocabulary.h"
#include "support.h"

namespace escape_test {

using namespace tapetune;
using namespace tapetune::test;
namespace fs = std::filesystem;

namespace {

const std::string red = "\033[31m";

// What a command prints on a terminal, without colors of its own.
std::string plain_terminal(const std::vector<std::string>& words) {
  const std::optional<std::string> text = on_terminal(words, [] { ::setenv("NO_COLOR", "1", 1); });
  REQUIRE(text);
  return *text;
}

// A tokenizer whose token 60 is the escape character.
void add_escape_token(const TinyModel& model) {
  Json tokenizer = from_text(read_file(model / "tokenizer.json"));
  Json vocab;
  for (const auto& [token, id] : tokenizer["model"]["vocab"].items()) vocab[id == 60 ? "ě" : token] = id;
  tokenizer["model"]["vocab"] = vocab;
  write_file(model / "tokenizer.json", to_text(tokenizer));
}

void no_controls(const RunResult& result) {
  INFO(result.out << result.err);
  for (const std::string& text : {result.out, result.err}) {
    CHECK(std::none_of(text.begin(), text.end(), [](char c) { return (c >= 0 && c < ' ' && c != '\n') || c == 0x7F; }));
  }
}

}  // namespace

TEST_CASE("escape: control characters, overrides and invalid UTF-8 become visible, everything else stays") {
  CHECK(printable("plain Größe 漢字 🙂 \\ \"") == "plain Größe 漢字 🙂 \\ \"");
  CHECK(printable("a\nb\tc\rd") == "a\\nb\\tc\\rd");
  CHECK(printable_lines("a\nb\tc\rd") == "a\nb\tc\\rd");
  CHECK(printable(red + std::string("\0\x07\x7f", 3)) == "\\u001b[31m\\u0000\\u0007\\u007f");
  CHECK(printable("\u009b31m \u0085") == "\\u009b31m \\u0085");
  CHECK(printable("\u202eevil\u2066\u200f\u061c\u2028") == "\\u202eevil\\u2066\\u200f\\u061c\\u2028");
  // Alone, cut off, overlong, a surrogate, beyond Unicode.
  CHECK(printable("\xff") == "\\xff");
  CHECK(printable("\xe2\x82") == "\\xe2\\x82");
  CHECK(printable("\xc0\xaf\xe0\x80\xaf") == "\\xc0\\xaf\\xe0\\x80\\xaf");
  CHECK(printable("\xed\xa0\x80") == "\\xed\\xa0\\x80");
  CHECK(printable("\xf4\x90\x80\x80") == "\\xf4\\x90\\x80\\x80");
  // JSON keeps its meaning.
  const Json json{{"k\u009b", "\u202e\x7f\033\n"}};
  CHECK(from_text(printable_lines(to_text(json, 2))) == json);
}

TEST_CASE("escape: names and settings of a checkpoint are printed without their control characters") {
  const TinyModel model;
  const std::string whole = read_file(model / "model.safetensors");
  std::string renamed = whole;  // of the same length, so that the header stays right
  const std::string name = "model.norm.weight";
  const std::size_t at = renamed.find(name);
  REQUIRE(at != std::string::npos);
  renamed.replace(at, name.size(), "m\\u001b[31mweight");
  REQUIRE(renamed.size() == whole.size());
  write_file(model / "model.safetensors", renamed);
  RunResult result = run({"inspect", model.path()});
  CHECK(result.exit == 1);
  no_controls(result);
  result = run({"convert", model.path(), "--out", model.out()});
  CHECK(result.exit == 1);
  no_controls(result);
  write_file(model / "model.safetensors", whole);

  Json config = from_text(read_file(model / "config.json"));
  config["architectures"] = {red + "Llama"};
  config["model_type"] = red + "llama\u202e";
  config["torch_dtype"] = red;
  write_file(model / "config.json", to_text(config));
  result = run({"inspect", model.path()});
  no_controls(result);
  CHECK_THAT(result.out + result.err, Contains("\\u001b[31m"));
}

TEST_CASE("escape: paths and recipes are printed without their control characters") {
  const TinyModel model;
  const std::string folder = (model.folder / (red + "m\n")).string();
  fs::copy(model.folder / "m", folder);
  const RunResult shown = run({"inspect", folder});
  CHECK(shown.exit == 0);
  CHECK_THAT(shown.out, Contains("\\u001b[31mm"));
  CHECK(shown.out.find('\033') == std::string::npos);
  no_controls(run({"inspect", folder + "no"}));
  CHECK(from_text(run({"inspect", folder, "--json"}).out)["path"] == folder);

  write_file(model.folder / "recipe.yaml", "model: \"\\e[31mx\"\n\"\\e[31mkey\": 1\n");
  no_controls(run({"recipes", "show", (model.folder / "recipe.yaml").string()}));
}

TEST_CASE("escape: text of documents and models is exact in a pipe and escaped on a terminal") {
  const TinyModel model;
  add_escape_token(model);
  TokenFileInfo info;
  const Vocabulary vocabulary = read_vocabulary(model.folder / "m");
  info.vocabulary_hash = vocabulary.hash;
  info.vocabulary_size = 61;
  TokenFileWriter writer(model.folder / "d.tokens", false, info);
  for (const int token : {8, 60, 9}) writer.append(static_cast<std::uint32_t>(token));
  writer.end_document();
  writer.commit();
  const std::vector<std::string> show{"data", "show", (model.folder / "d.tokens").string(), "--model", model.path()};
  CHECK_THAT(run(show).out, Contains("a\033b"));
  const std::string shown = plain_terminal(show);
  CHECK_THAT(shown, Contains("a\\u001bb"));
  CHECK(shown.find('\033') == std::string::npos);

  const std::vector<std::string> generate{"generate", model.path(), "--tokens", "8,60,9", "--max-new-tokens", "1"};
  CHECK_THAT(run(generate).out, Contains("a\033b"));
  const std::string generated = plain_terminal(generate);
  CHECK_THAT(generated, Contains("a\\u001bb"));
  CHECK(generated.find('\033') == std::string::npos);
}

}  // namespace escape_test
