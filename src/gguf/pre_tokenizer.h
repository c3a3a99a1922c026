// How a text is cut before byte pairs are merged: llama.cpp has a name for each way, tokenizer.json spells it out.
#pragma once

#include <nlohmann/json.hpp>

#include <span>
#include <string>
#include <string_view>

#include "core/json.h"

namespace tapetune::gguf {

struct PreTokenizer {
  std::string_view name;  // "llama-bpe"
  // In the order in which they cut: "digits" one by one, "words" as GPT-2, "bytes" without cutting, or a pattern.
  std::span<const std::string_view> steps;
  bool ignore_merges = false;  // a word that is a token is one, whatever the merges say
  bool adds_bos = false;       // unless the file says otherwise
};

// Nothing for a name that tapetune does not know.
const PreTokenizer* find_pre_tokenizer(std::string_view name);
Json to_json(const PreTokenizer& pre);

// The one that tokenizer.json's "pre_tokenizer" spells out; nothing where llama.cpp has none like it.
const PreTokenizer* match_pre_tokenizer(const nlohmann::json& json);

}  // namespace tapetune::gguf
