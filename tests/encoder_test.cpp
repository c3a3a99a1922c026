// Texts to token ids: broken UTF-8, and pieces that give the ids of the whole.
#include "data/encoder.h"

#include "catch.h"
#include "core/json.h"
#include "data/utf8.h"
#include "data/vocabulary.h"
#include "sample_texts.h"
#include "support.h"

namespace encoder_test {

using namespace tapetune;
using namespace tapetune::test;
namespace fs = std::filesystem;

TEST_CASE("invalid UTF-8 is counted and replaced as Rust and Python do") {
  const std::vector<std::pair<std::string, std::size_t>> cases{{"plain ascii that is long enough", 0},
                                                               {"é€😀", 0},
                                                               {"\xff\xfe", 2},
                                                               {"cut \xe4\xb8", 1},
                                                               {"\xf0\x9f\x98", 1},
                                                               {"\xf0\x9f and", 1},
                                                               {"\xc0\xaf", 2},
                                                               {"\xe0\x80\xaf", 3},
                                                               {"\xed\xa0\x80", 3},
                                                               {"\xf4\x90\x80\x80", 4},
                                                               {"\xf8\x88\x80\x80", 4},
                                                               {"a\xe9"
                                                                "b\xc3",
                                                                2}};
  const TempFolder folder;
  tiny_tokenizer(folder.path());
  const Tokenizer tokenizer = Tokenizer::open(folder.path());
  for (const auto& [text, count] : cases) {
    CAPTURE(text);
    CHECK(count_invalid_utf8(text) == count);
    CHECK(count_invalid_utf8(replace_invalid_utf8(text)) == 0);
    CHECK(tokenizer.encode(replace_invalid_utf8(text)) == tokenizer.encode(text));
  }
  CHECK(replace_invalid_utf8("a\xff\xc3\xa9") == "a\xef\xbf\xbdé");
}

TEST_CASE("texts in pieces give the ids of the whole, for tokenizers of both families") {
  const TempFolder folder;
  for (const auto& make : {tiny_tokenizer, sentence_tokenizer}) {
    make(folder.path());
    const Tokenizer tokenizer = Tokenizer::open(folder.path());
    const nlohmann::json json = read_tokenizer_json(folder.path());
    TextEncoder encoder(tokenizer, json, 2);
    REQUIRE(encoder.split_points().any());
    std::size_t cut = 0;
    for (unsigned seed = 0; seed < 60; ++seed) {
      const std::string text = random_text(3000, seed);
      std::vector<TextPiece> pieces;
      std::size_t begin = 0;
      for (std::size_t at; (at = encoder.split_points().next(text, begin + 1 + seed)) != std::string::npos; begin = at)
        pieces.push_back({text.substr(begin, at - begin), begin == 0, false});
      pieces.push_back({text.substr(begin), begin == 0, true});
      cut += pieces.size() - 1;
      pieces.push_back({"the end", true, true});
      const auto ids = encoder.encode(pieces);
      TokenIds together;
      for (std::size_t i = 0; i + 1 < ids.size(); ++i) together.insert(together.end(), ids[i].begin(), ids[i].end());
      CAPTURE(seed);
      REQUIRE(together == tokenizer.encode(text, false));
      REQUIRE(std::ranges::equal(ids.back(), tokenizer.encode("the end", false)));
    }
    CHECK(cut > 1000);
  }
  // No split point where a piece of the vocabulary lies across, nor beside an added token that brings a space of its
  // own.
  const SplitPoints split_points(read_tokenizer_json(folder.path()));
  CHECK(split_points.next("the, the", 1) == std::string::npos);
  CHECK(split_points.next("the. the", 1) == 4);
  CHECK(split_points.next("</s> the", 1) == std::string::npos);
  CHECK(split_points.next("the <s>", 1) == std::string::npos);
}

TEST_CASE("a tokenizer that is not known well is given whole documents") {
  const TempFolder folder;
  tiny_tokenizer(folder.path());
  const auto split_points_with = [&](const char* pointer, const Json& value) {
    Json json = from_text(read_file(folder / "tokenizer.json"));
    json[Json::json_pointer(pointer)] = value;
    return SplitPoints(nlohmann::json::parse(to_text(json))).any();
  };
  CHECK(split_points_with("/version", "1.0"));
  CHECK(split_points_with("/normalizer", {{"type", "NFC"}}));
  CHECK_FALSE(split_points_with("/normalizer", {{"type", "Lowercase"}}));
  CHECK_FALSE(split_points_with("/pre_tokenizer", {{"type", "Whitespace"}}));
  CHECK_FALSE(split_points_with("/pre_tokenizer/add_prefix_space", true));
  CHECK_FALSE(split_points_with("/model/dropout", 0.1));
  CHECK_FALSE(split_points_with("/model/type", "Unigram"));
  CHECK_FALSE(split_points_with("/added_tokens/0/lstrip", true));
  CHECK_FALSE(split_points_with("/added_tokens/0/content", "two words"));
}

}  // namespace encoder_test
