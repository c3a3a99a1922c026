#include "data/vocabulary.h"

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/file.h"

namespace tapetune {

namespace {

using Piece = std::pair<std::uint64_t, std::string_view>;

// FNV-1a: a few lines that give the same number everywhere.
class Hash {
 public:
  void add(std::string_view bytes) {
    for (const char c : bytes) value_ = (value_ ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  }
  void add(std::uint64_t number) {
    for (int shift = 0; shift < 64; shift += 8) value_ = (value_ ^ (number >> shift & 0xff)) * 0x100000001b3;
  }
  std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 0xcbf29ce484222325;
};

std::filesystem::path file_in(const std::filesystem::path& folder) { return folder / "tokenizer.json"; }

}  // namespace

nlohmann::json read_tokenizer_json(const std::filesystem::path& folder) {
  const std::string text = read_text(file_in(folder));
  nlohmann::json tokenizer = nlohmann::json::parse(text, nullptr, false);
  if (!tokenizer.is_object() || !tokenizer.contains("model") || !tokenizer["model"].is_object()) {
    fail("tokenizer", "{}: is not a tokenizer; copy it again from the original model.", file_in(folder).string());
  }
  return tokenizer;
}

Vocabulary vocabulary_of(const nlohmann::json& tokenizer, const std::filesystem::path& folder) {
  std::vector<Piece> pieces;
  const nlohmann::json& model = tokenizer["model"];
  if (const auto vocab = model.find("vocab"); vocab != model.end() && vocab->is_object()) {
    for (auto entry = vocab->begin(); entry != vocab->end(); ++entry) {
      if (entry->is_number_unsigned()) pieces.emplace_back(entry->get<std::uint64_t>(), entry.key());
    }
  } else if (vocab != model.end() && vocab->is_array()) {  // Unigram: [piece, score], in the order of ids
    for (std::size_t id = 0; id < vocab->size(); ++id) {
      const nlohmann::json& entry = (*vocab)[id];
      if (entry.is_array() && !entry.empty() && entry[0].is_string())
        pieces.emplace_back(id, entry[0].get_ref<const std::string&>());
    }
  }
  if (const auto added = tokenizer.find("added_tokens"); added != tokenizer.end() && added->is_array()) {
    for (const nlohmann::json& token : *added) {
      if (token.is_object() && token.value("id", -1) >= 0 && token.contains("content") && token["content"].is_string())
        pieces.emplace_back(token["id"].get<std::uint64_t>(), token["content"].get_ref<const std::string&>());
    }
  }
  if (pieces.empty()) fail("tokenizer", "{}: has no vocabulary; copy it again.", file_in(folder).string());
  std::ranges::sort(pieces);
  pieces.erase(std::unique(pieces.begin(), pieces.end()), pieces.end());  // added tokens often stand in both
  Hash hash;
  for (const auto& [id, piece] : pieces) {
    hash.add(id);
    hash.add(piece);
    hash.add(std::string_view("\xff"));  // in no UTF-8 text, so that pieces cannot run into each other
  }
  return {file_in(folder).string(), hash.value(), static_cast<std::int64_t>(pieces.back().first) + 1};
}

Vocabulary read_vocabulary(const std::filesystem::path& folder) {
  return vocabulary_of(read_tokenizer_json(folder), folder);
}

}  // namespace tapetune
