// Texts and a tokenizer that are hard to cut into pieces.
#pragma once

#include <filesystem>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/json.h"
#include "support.h"

namespace tapetune::test {

// As Llama 2: no pre-tokenizer, "▁" for spaces and one before every text, bytes for what is unknown.
inline void sentence_tokenizer(const std::filesystem::path& folder) {
  Json vocab, merges = Json::array();
  for (const char* token : {"<unk>", "<s>", "</s>"}) vocab[token] = vocab.size();
  for (int byte = 0; byte < 256; ++byte) vocab[fmt::format("<0x{:02X}>", byte)] = vocab.size();
  vocab["▁"] = vocab.size();
  for (char c = 'a'; c <= 'z'; ++c) vocab[std::string(1, c)] = vocab.size();
  for (const char* c : {".", ",", "é"}) vocab[c] = vocab.size();
  const auto merge = [&](const std::string& a, const std::string& b) {
    merges.push_back(a + " " + b);
    vocab[a + b] = vocab.size();
  };
  for (const auto& [a, b] : std::vector<std::pair<std::string, std::string>>{
           {"t", "h"}, {"th", "e"}, {"▁", "the"}, {"▁", "▁"}, {"▁", "a"}, {"a", "n"}, {"▁a", "n"}, {".", "."}})
    merge(a, b);
  merge(",", "▁");  // a comma may take the space after it: no place to cut
  const auto special = [](int id, const char* text) {
    return Json{{"id", id},        {"content", text},     {"single_word", false}, {"lstrip", false},
                {"rstrip", false}, {"normalized", false}, {"special", true}};
  };
  Json tokenizer;
  tokenizer["version"] = "1.0";
  tokenizer["added_tokens"] = {special(0, "<unk>"), special(1, "<s>"), special(2, "</s>")};
  tokenizer["normalizer"] = from_text(
      R"({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"},
          {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]})");
  tokenizer["model"] = {{"type", "BPE"},         {"unk_token", "<unk>"}, {"fuse_unk", true},
                        {"byte_fallback", true}, {"vocab", vocab},       {"merges", merges}};
  write_file(folder / "tokenizer.json", to_text(tokenizer));
  write_file(folder / "tokenizer_config.json", R"({"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": true})");
}

// Words, spaces, line ends, added tokens and broken bytes in any order.
inline std::string random_text(std::size_t size, unsigned seed) {
  const std::vector<std::string> parts{
      "the", "an", "a",    " ",    " ", " ", " ",    "  ",   "\n",           "\n\n",     "\r\n", "\t",
      ".",   "..", ",",    ", ",   "é", "x", "</s>", " <s>", "\xe3\x80\x80", "\xc2\xa0", "中文", "▁",
      "12",  "'s", "\xff", "\xe4", "<", ">", " the", " an",  "\r ",          "Z"};
  std::mt19937 random(seed);
  std::string text;
  while (text.size() < size) text += parts[random() % parts.size()];
  return text;
}

}  // namespace tapetune::test
