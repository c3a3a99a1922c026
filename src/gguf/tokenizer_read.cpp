#include <algorithm>
#include <string_view>
#include <tuple>
#include <unordered_map>

#include "core/error.h"
#include "core/json.h"
#include "core/log.h"
#include "data/utf8.h"
#include "gguf/pre_tokenizer.h"
#include "gguf/tokenizer.h"

namespace tapetune::gguf {

namespace {

struct GgufVocabulary {
  std::vector<std::string> tokens;
  std::vector<TokenType> types;
  std::vector<double> scores;       // sentencepiece's
  std::vector<std::string> merges;  // "a b"
};

GgufVocabulary read_gguf_vocabulary(const File& file, std::int64_t size) {
  GgufVocabulary vocabulary;
  vocabulary.tokens = file.texts("tokenizer.ggml.tokens");
  if (static_cast<std::int64_t>(vocabulary.tokens.size()) != size) {
    fail("gguf", "{}: tokenizer.ggml.tokens has {} tokens, but token_embd.weight has {} rows; the file is damaged.",
         file.where(), vocabulary.tokens.size(), size);
  }
  std::unordered_map<std::string_view, std::size_t> ids;
  for (std::size_t i = 0; i < vocabulary.tokens.size(); ++i) {
    if (count_invalid_utf8(vocabulary.tokens[i]) != 0) {
      fail("gguf", "{}: token {} is not UTF-8, so that tokenizer.json cannot hold it.", file.where(), i);
    }
    if (!ids.emplace(vocabulary.tokens[i], i).second) {
      fail("gguf", "{}: tokens {} and {} are the same; the file is damaged.", file.where(), ids[vocabulary.tokens[i]],
           i);
    }
  }
  const auto list = [&](const char* key) {
    std::vector<double> numbers = file.numbers(key);
    if (!numbers.empty() && numbers.size() != vocabulary.tokens.size()) {
      fail("gguf", "{}: {} has {} numbers for {} tokens; the file is damaged.", file.where(), key, numbers.size(),
           vocabulary.tokens.size());
    }
    return numbers;
  };
  vocabulary.types.assign(vocabulary.tokens.size(), TokenType::normal);
  const std::vector<double> types = list("tokenizer.ggml.token_type");
  for (std::size_t i = 0; i < types.size(); ++i) {
    if (types[i] >= 1 && types[i] <= 6) vocabulary.types[i] = static_cast<TokenType>(static_cast<int>(types[i]));
  }
  vocabulary.scores = list("tokenizer.ggml.scores");
  vocabulary.merges = file.texts("tokenizer.ggml.merges");
  for (const std::string& merge : vocabulary.merges) {
    const std::size_t gap = merge.find(' ', 1);
    if (gap == merge.npos || !ids.contains(merge.substr(0, gap)) || !ids.contains(merge.substr(gap + 1)) ||
        !ids.contains(merge.substr(0, gap) + merge.substr(gap + 1))) {
      fail("gguf",
           "{}: tokenizer.ggml.merges has \"{}\", which does not join two tokens to a third; the file is damaged.",
           file.where(), replace_invalid_utf8(merge));
    }
  }
  return vocabulary;
}

// Sentencepiece keeps a score for each token and none for pairs: any two neighbours that make a token may merge, the
// best token first. As pairs in the order of their scores that is BPE; ties are ordered as transformers orders them.
std::vector<std::string> merges_from_scores(const GgufVocabulary& vocabulary) {
  struct Merge {
    double score;
    std::size_t left_letters, right_letters, left, right;
  };
  std::unordered_map<std::string_view, std::size_t> ids;
  for (std::size_t i = 0; i < vocabulary.tokens.size(); ++i) {
    if (vocabulary.types[i] == TokenType::normal) ids.emplace(vocabulary.tokens[i], i);
  }
  std::vector<Merge> merges;
  for (std::size_t i = 0; i < vocabulary.tokens.size(); ++i) {
    if (vocabulary.types[i] != TokenType::normal) continue;
    const std::string_view token = vocabulary.tokens[i];
    std::vector<std::size_t> starts;  // of letters, but the first
    for (std::size_t at = 1; at < token.size(); ++at) {
      if ((static_cast<unsigned char>(token[at]) & 0xc0) != 0x80) starts.push_back(at);
    }
    const std::size_t first = merges.size();
    for (std::size_t letters = 1; letters <= starts.size(); ++letters) {
      const auto left = ids.find(token.substr(0, starts[letters - 1]));
      const auto right = ids.find(token.substr(starts[letters - 1]));
      if (left == ids.end() || right == ids.end()) continue;
      merges.push_back({vocabulary.scores[i], letters, starts.size() + 1 - letters, left->second, right->second});
    }
    std::sort(merges.begin() + static_cast<std::ptrdiff_t>(first), merges.end(),
              [](const Merge& a, const Merge& b) { return std::pair(a.left, a.right) < std::pair(b.left, b.right); });
  }
  std::stable_sort(merges.begin(), merges.end(), [](const Merge& a, const Merge& b) {
    return std::tuple(a.score, a.left_letters, a.right_letters) > std::tuple(b.score, b.left_letters, b.right_letters);
  });
  std::vector<std::string> pairs;
  pairs.reserve(merges.size());
  for (const Merge& merge : merges) {
    pairs.push_back(vocabulary.tokens[merge.left] + " " + vocabulary.tokens[merge.right]);
  }
  return pairs;
}

struct SpecialIds {
  std::optional<std::int64_t> bos, eos, unknown, padding;
  bool add_bos = false, add_eos = false;
};

SpecialIds read_special(const File& file, bool sentencepiece, bool adds_bos, std::size_t tokens) {
  const auto id = [&](const char* name, std::optional<std::int64_t> fallback) {
    const std::string key = fmt::format("tokenizer.ggml.{}_token_id", name);
    const std::optional<std::int64_t> value = file.whole(key);
    if (value && (*value < 0 || static_cast<std::uint64_t>(*value) >= tokens)) {
      fail("gguf", "{}: {} is {}, but there are {} tokens.", file.where(), key, *value, tokens);
    }
    const bool there = fallback && static_cast<std::uint64_t>(*fallback) < tokens;
    return value ? value : sentencepiece && there ? fallback : std::nullopt;
  };
  SpecialIds special{id("bos", 1), id("eos", 2), id("unknown", 0), id("padding", std::nullopt)};
  special.add_bos = special.bos && file.flag("tokenizer.ggml.add_bos_token").value_or(sentencepiece || adds_bos);
  special.add_eos = special.eos && file.flag("tokenizer.ggml.add_eos_token").value_or(false);
  return special;
}

Json added_tokens(const GgufVocabulary& vocabulary) {
  Json added = Json::array();
  for (std::size_t i = 0; i < vocabulary.tokens.size(); ++i) {
    const TokenType type = vocabulary.types[i];
    if (type != TokenType::control && type != TokenType::user_defined && type != TokenType::unknown) continue;
    added.push_back({{"id", i},
                     {"content", vocabulary.tokens[i]},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", type != TokenType::user_defined}});
  }
  return added;
}

Json post_processor(const SpecialIds& special, const GgufVocabulary& vocabulary) {
  if (!special.add_bos && !special.add_eos) return nullptr;
  Json known = Json::object();
  const auto mark = [&](std::int64_t id, int text) -> Json {
    const std::string& token = vocabulary.tokens[static_cast<std::size_t>(id)];
    known[token] = {{"id", token}, {"ids", Json::array({id})}, {"tokens", Json::array({token})}};
    return {{"SpecialToken", {{"id", token}, {"type_id", text}}}};
  };
  const auto frame = [&](Json& list, const char* name, int text) {
    if (special.add_bos) list.push_back(mark(*special.bos, text));
    list.push_back({{"Sequence", {{"id", name}, {"type_id", text}}}});
    if (special.add_eos) list.push_back(mark(*special.eos, text));
  };
  Json single = Json::array(), pair = Json::array();
  frame(single, "A", 0);
  frame(pair, "A", 0);
  frame(pair, "B", 1);
  return {{"type", "TemplateProcessing"}, {"single", single}, {"pair", pair}, {"special_tokens", known}};
}

// Sentencepiece's spaces, in and out.
void add_spaces(Json& json, bool prefix) {
  Json steps = Json::array();
  if (prefix) steps.push_back({{"type", "Prepend"}, {"prepend", sentencepiece_space}});
  steps.push_back({{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", sentencepiece_space}});
  json["normalizer"] = {{"type", "Sequence"}, {"normalizers", steps}};
  json["pre_tokenizer"] = nullptr;
  Json back = Json::array({{{"type", "Replace"}, {"pattern", {{"String", sentencepiece_space}}}, {"content", " "}},
                           {{"type", "ByteFallback"}},
                           {{"type", "Fuse"}}});
  if (prefix) back.push_back({{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}});
  json["decoder"] = {{"type", "Sequence"}, {"decoders", back}};
}

// Written by hand where it is long: an ordered Json object looks for each new key among all before it.
std::string with_vocabulary(const Json& outer, const Json& model, const GgufVocabulary& vocabulary) {
  const auto open = [](const Json& object) {
    std::string text = to_text(object);
    text.pop_back();
    return text;
  };
  std::string text = open(outer) + ",\"model\":" + open(model) + ",\"vocab\":{";
  for (std::size_t i = 0; i < vocabulary.tokens.size(); ++i) {
    text += fmt::format("{}{}:{}", i == 0 ? "" : ",", to_text(Json(vocabulary.tokens[i])), i);
  }
  text += "},\"merges\":[";
  for (std::size_t i = 0; i < vocabulary.merges.size(); ++i) {
    text += fmt::format("{}{}", i == 0 ? "" : ",", to_text(Json(vocabulary.merges[i])));
  }
  return text + "]}}\n";
}

std::string tokenizer_config(const File& file, const ModelConfig& config, const SpecialIds& special,
                             const GgufVocabulary& vocabulary) {
  Json json;
  json["tokenizer_class"] = "PreTrainedTokenizerFast";  // takes tokenizer.json as it is
  const auto token = [&](const char* name, std::optional<std::int64_t> id) {
    if (id) json[name] = vocabulary.tokens[static_cast<std::size_t>(*id)];
  };
  token("bos_token", special.bos);
  token("eos_token", special.eos);
  token("unk_token", special.unknown);
  token("pad_token", special.padding);
  json["add_bos_token"] = special.add_bos;
  json["add_eos_token"] = special.add_eos;
  json["clean_up_tokenization_spaces"] = false;
  // transformers 4 would return token_type_ids as well, which no Llama takes.
  json["model_input_names"] = {"input_ids", "attention_mask"};
  json["model_max_length"] = config.context;
  if (const auto chat = file.text("tokenizer.chat_template")) json["chat_template"] = replace_invalid_utf8(*chat);
  return to_text(json, 2) + "\n";
}

}  // namespace

std::map<std::string, std::string> read_tokenizer(const File& file, const ModelConfig& config) {
  const std::string kind = file.text("tokenizer.ggml.model").value_or("none");
  if (kind == "none" || kind == "no_vocab") {
    warn("{}: has no tokenizer; copy tokenizer.json and tokenizer_config.json from the original model", file.where());
    return {};
  }
  const bool sentencepiece = kind == "llama";
  if (!sentencepiece && kind != "gpt2") {
    fail("gguf",
         "{}: has a tokenizer of kind {}, but tapetune imports gpt2 (byte-level BPE) and llama (sentencepiece).",
         file.where(), kind);
  }
  const std::string pre_name = file.text("tokenizer.ggml.pre").value_or("default");
  const PreTokenizer* pre = sentencepiece ? nullptr : find_pre_tokenizer(pre_name);
  if (!sentencepiece && pre == nullptr) {
    fail("gguf",
         "{}: has the pre-tokenizer \"{}\", but tapetune supports smollm, gpt-2, llama-bpe, qwen2 and default; use the "
         "original Hugging Face model with its tokenizer.json.",
         file.where(), pre_name);
  }
  GgufVocabulary vocabulary = read_gguf_vocabulary(file, config.vocab_size);
  if (!file.has("tokenizer.ggml.merges")) {
    if (!sentencepiece || vocabulary.scores.empty()) {
      fail("gguf", "{}: has neither merges nor scores for its tokens; use the original Hugging Face model.",
           file.where());
    }
    vocabulary.merges = merges_from_scores(vocabulary);
  }
  const SpecialIds special =
      read_special(file, sentencepiece, pre != nullptr && pre->adds_bos, vocabulary.tokens.size());

  Json json;
  json["version"] = "1.0";
  json["truncation"] = nullptr;
  json["padding"] = nullptr;
  json["added_tokens"] = added_tokens(vocabulary);
  if (sentencepiece) {
    add_spaces(json, file.flag("tokenizer.ggml.add_space_prefix").value_or(true));
  } else {
    json["normalizer"] = nullptr;
    json["pre_tokenizer"] = to_json(*pre);
    json["decoder"] = {{"type", "ByteLevel"}, {"add_prefix_space", true}, {"trim_offsets", true}, {"use_regex", true}};
  }
  json["post_processor"] = post_processor(special, vocabulary);
  Json model;
  model["type"] = "BPE";
  model["dropout"] = nullptr;
  model["unk_token"] =
      sentencepiece && special.unknown ? Json(vocabulary.tokens[static_cast<std::size_t>(*special.unknown)]) : Json();
  model["continuing_subword_prefix"] = nullptr;
  model["end_of_word_suffix"] = nullptr;
  model["fuse_unk"] = sentencepiece;
  model["byte_fallback"] = sentencepiece;
  model["ignore_merges"] = pre != nullptr && pre->ignore_merges;
  return {{"tokenizer.json", with_vocabulary(json, model, vocabulary)},
          {"tokenizer_config.json", tokenizer_config(file, config, special, vocabulary)}};
}

}  // namespace tapetune::gguf
