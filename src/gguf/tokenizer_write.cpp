#include <nlohmann/json.hpp>

#include <algorithm>
#include <unordered_map>

#include "core/error.h"
#include "core/file.h"
#include "gguf/pre_tokenizer.h"
#include "gguf/tokenizer.h"
#include "hf/tokenizer.h"

namespace tapetune::gguf {
namespace fs = std::filesystem;

namespace {

// Not our ordered Json, which looks for each new key of a vocabulary among all before it.
using Sorted = nlohmann::json;

Sorted parse(const fs::path& path) {
  std::error_code status;
  if (!fs::exists(path, status)) return Sorted::object();
  Sorted json = Sorted::parse(read_text(path), nullptr, /*allow_exceptions=*/false);
  if (!json.is_object())
    fail("gguf", "{}: must be a JSON object; copy it again from the original model.", path.string());
  return json;
}

struct JsonVocabulary {
  std::vector<std::string> tokens;
  std::vector<std::int32_t> types;
  std::unordered_map<std::string, std::int64_t> ids;
};

bool is_byte(std::string_view token) { return token.size() == 6 && token.starts_with("<0x") && token.ends_with('>'); }

JsonVocabulary read_json_vocabulary(const Sorted& json, std::int64_t size, const std::string& where) {
  JsonVocabulary vocabulary;
  vocabulary.tokens.resize(static_cast<std::size_t>(size));
  vocabulary.types.assign(static_cast<std::size_t>(size), static_cast<std::int32_t>(TokenType::unused));
  const auto place = [&](const std::string& token, std::int64_t id, TokenType type) {
    if (id < 0 || id >= size) {
      fail("gguf", "{}: token \"{}\" has id {}, but the model has {} rows for tokens; they do not belong together.",
           where, token, id, size);
    }
    vocabulary.tokens[static_cast<std::size_t>(id)] = token;
    vocabulary.types[static_cast<std::size_t>(id)] = static_cast<std::int32_t>(type);
    vocabulary.ids[token] = id;
  };
  const Sorted& model = json.at("model");
  const bool bytes = model.value("byte_fallback", false);
  for (const auto& [token, id] : model.at("vocab").items()) {
    place(token, id.get<std::int64_t>(), bytes && is_byte(token) ? TokenType::byte : TokenType::normal);
  }
  if (json.contains("added_tokens")) {
    for (const Sorted& added : json.at("added_tokens")) {
      place(added.at("content").get<std::string>(), added.at("id").get<std::int64_t>(),
            added.value("special", false) ? TokenType::control : TokenType::user_defined);
    }
  }
  // Rows without a token, as models with rounded sizes have them.
  for (std::size_t i = 0; i < vocabulary.tokens.size(); ++i) {
    if (vocabulary.tokens[i].empty()) vocabulary.tokens[i] = fmt::format("[PAD{}]", i);
  }
  return vocabulary;
}

// "a b", or ["a", "b"] in newer files.
std::vector<std::pair<std::string, std::string>> read_merges(const Sorted& model, const std::string& where) {
  std::vector<std::pair<std::string, std::string>> merges;
  for (const Sorted& merge : model.at("merges")) {
    if (merge.is_array() && merge.size() == 2) {
      merges.emplace_back(merge.at(0).get<std::string>(), merge.at(1).get<std::string>());
      continue;
    }
    const std::string text = merge.is_string() ? merge.get<std::string>() : std::string();
    const std::size_t gap = text.find(' ');
    if (gap == text.npos) fail("gguf", "{}: the merge {} is not a pair; copy the file again.", where, to_text(merge));
    merges.emplace_back(text.substr(0, gap), text.substr(gap + 1));
  }
  return merges;
}

// The way back from pairs to scores: llama.cpp merges the pair with the best result first, and the order of the pairs
// says which that is.
std::vector<float> scores_of(const JsonVocabulary& vocabulary,
                             const std::vector<std::pair<std::string, std::string>>& merges) {
  std::unordered_map<std::string, float> ranks;
  for (const auto& [left, right] : merges) ranks.emplace(left + right, static_cast<float>(ranks.size()));
  std::vector<float> scores(vocabulary.tokens.size(), 0);
  auto last = static_cast<float>(ranks.size());
  for (std::size_t i = 0; i < scores.size(); ++i) {
    if (vocabulary.types[i] != static_cast<std::int32_t>(TokenType::normal)) continue;
    const auto found = ranks.find(vocabulary.tokens[i]);
    scores[i] = found != ranks.end() ? -found->second : -last++;  // letters come after all that is merged
  }
  return scores;
}

bool replaces_spaces(const Sorted& step) {
  return step.value("type", "") == "Replace" && step.at("pattern").value("String", "") == " " &&
         step.value("content", "") == sentencepiece_space;
}

// Whether a space is put before the text; fails where spaces are treated in a way that llama.cpp has not.
bool prefixes_space(const Sorted& json, const std::string& where) {
  const Sorted none;
  const Sorted& normalizer = json.contains("normalizer") ? json.at("normalizer") : none;
  const Sorted& pre = json.contains("pre_tokenizer") ? json.at("pre_tokenizer") : none;
  if (normalizer.is_null() && pre.is_object() && pre.value("type", "") == "Metaspace" &&
      pre.value("replacement", "") == sentencepiece_space) {
    return pre.value("prepend_scheme", pre.value("add_prefix_space", true) ? "always" : "never") != "never";
  }
  if (pre.is_null() && normalizer.is_object()) {
    const Sorted steps =
        normalizer.value("type", "") == "Sequence" ? normalizer.at("normalizers") : Sorted::array({normalizer});
    if (steps.size() == 1 && replaces_spaces(steps[0])) return false;
    if (steps.size() == 2 && steps[0].value("type", "") == "Prepend" &&
        steps[0].value("prepend", "") == sentencepiece_space && replaces_spaces(steps[1])) {
      return true;
    }
  }
  fail("gguf", "{}: its normalizer has no equivalent in llama.cpp; only those of Llama tokenizers can be exported.",
       where);
}

// The id of a token that tokenizer_config.json names: "<s>" or {"content": "<s>", …}.
std::optional<std::int64_t> named_id(const Sorted& config, const char* key, const JsonVocabulary& vocabulary) {
  if (!config.contains(key)) return std::nullopt;
  const Sorted& value = config.at(key);
  const std::string token = value.is_string()   ? value.get<std::string>()
                            : value.is_object() ? value.value("content", "")
                                                : std::string();
  const auto found = vocabulary.ids.find(token);
  return found == vocabulary.ids.end() ? std::nullopt : std::optional(found->second);
}

void write_special(Metadata& metadata, const fs::path& folder, const Sorted& tokenizer_config,
                   const JsonVocabulary& vocabulary, const ModelConfig& config) {
  const auto id = [&](const char* key, const char* token, std::optional<std::int64_t> fallback) {
    const auto value = named_id(tokenizer_config, token, vocabulary);
    if (value || fallback) metadata.whole(fmt::format("tokenizer.ggml.{}_token_id", key), value ? *value : *fallback);
    return value ? value : fallback;
  };
  const auto bos = id("bos", "bos_token", config.bos);
  const auto eos = id("eos", "eos_token", config.eos.empty() ? std::nullopt : std::optional(config.eos.front()));
  id("unknown", "unk_token", std::nullopt);
  id("padding", "pad_token", std::nullopt);
  // What tapetune itself puts around a text is what llama.cpp shall put there.
  TokenIds framed = Tokenizer::open(folder).encode("");
  const bool starts = bos && !framed.empty() && framed.front() == *bos;
  if (starts) framed.erase(framed.begin());
  metadata.flag("tokenizer.ggml.add_bos_token", starts);
  metadata.flag("tokenizer.ggml.add_eos_token", eos && !framed.empty() && framed.back() == *eos);
  std::error_code status;
  const fs::path separate = folder / "chat_template.jinja";
  if (fs::exists(separate, status)) {
    metadata.text("tokenizer.chat_template", read_text(separate));
  } else if (tokenizer_config.contains("chat_template") && tokenizer_config.at("chat_template").is_string()) {
    metadata.text("tokenizer.chat_template", tokenizer_config.at("chat_template").get<std::string>());
  }
}

void write_vocabulary(Metadata& metadata, const Sorted& json, const JsonVocabulary& vocabulary,
                      const std::string& where) {
  const Sorted& model = json.at("model");
  if (model.value("type", "") != "BPE") {
    fail("gguf", "{}: is of type {}, but llama.cpp's Llama tokenizers are BPE.", where, model.value("type", "(none)"));
  }
  const auto merges = read_merges(model, where);
  if (model.value("byte_fallback", false)) {
    const bool prefix = prefixes_space(json, where);
    metadata.text("tokenizer.ggml.model", "llama");
    metadata.text("tokenizer.ggml.pre", "default");
    metadata.texts("tokenizer.ggml.tokens", vocabulary.tokens);
    metadata.numbers("tokenizer.ggml.scores", scores_of(vocabulary, merges));
    metadata.wholes("tokenizer.ggml.token_type", vocabulary.types);
    metadata.flag("tokenizer.ggml.add_space_prefix", prefix);
    return;
  }
  const PreTokenizer* pre = json.contains("pre_tokenizer") ? match_pre_tokenizer(json.at("pre_tokenizer")) : nullptr;
  if (pre == nullptr) {
    fail("gguf",
         "{}: its pre-tokenizer has no equivalent in llama.cpp; supported are smollm, gpt-2, llama-bpe and "
         "qwen2.",
         where);
  }
  metadata.text("tokenizer.ggml.model", "gpt2");
  metadata.text("tokenizer.ggml.pre", pre->name);
  metadata.texts("tokenizer.ggml.tokens", vocabulary.tokens);
  metadata.wholes("tokenizer.ggml.token_type", vocabulary.types);
  std::vector<std::string> pairs;
  pairs.reserve(merges.size());
  for (const auto& [left, right] : merges) pairs.push_back(left + " " + right);
  metadata.texts("tokenizer.ggml.merges", pairs);
}

}  // namespace

void write_tokenizer(Metadata& metadata, const fs::path& folder, const ModelConfig& config) {
  const fs::path path = folder / "tokenizer.json";
  std::error_code status;
  if (!fs::exists(path, status)) {
    fail("gguf", "{}: no such file; llama.cpp needs the tokenizer within the GGUF file.", path.string());
  }
  try {
    const Sorted json = parse(path);
    const JsonVocabulary vocabulary = read_json_vocabulary(json, config.vocab_size, path.string());
    write_vocabulary(metadata, json, vocabulary, path.string());
    write_special(metadata, folder, parse(folder / "tokenizer_config.json"), vocabulary, config);
  } catch (const Sorted::exception& error) {  // a key that is missing or of another type
    fail("gguf", "{}: is not as tokenizers writes it ({}); copy it again from the original model.", path.string(),
         error.what());
  }
}

}  // namespace tapetune::gguf
