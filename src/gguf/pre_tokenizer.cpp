#include "gguf/pre_tokenizer.h"

#include <algorithm>
#include <array>
#include <vector>

namespace tapetune::gguf {

namespace {

constexpr std::string_view digits = "digits", words = "words", bytes = "bytes";

constexpr std::array gpt2_steps{words};
constexpr std::array smollm_steps{digits, words};
constexpr std::array<std::string_view, 2> llama3_steps{
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+)"
    R"(|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
    bytes};
constexpr std::array<std::string_view, 2> qwen2_steps{R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+)"
                                                      R"(|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
                                                      bytes};
// What llama.cpp does with files that name none.
constexpr std::array<std::string_view, 5> default_steps{
    R"([\p{P}\$\+<=>\^~\|]+)",
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S))",
    R"(\p{N}+)",
    R"([0-9][0-9][0-9])",
    bytes,
};

const std::array<PreTokenizer, 5> known{{
    {"gpt-2", gpt2_steps},
    {"smollm", smollm_steps},
    {"llama-bpe", llama3_steps, true, true},
    {"qwen2", qwen2_steps},
    {"default", default_steps},
}};

Json step_json(std::string_view step) {
  if (step == digits) return {{"type", "Digits"}, {"individual_digits", true}};
  if (step == words || step == bytes) {
    return {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", step == words}};
  }
  return {{"type", "Split"}, {"pattern", {{"Regex", step}}}, {"behavior", "Isolated"}, {"invert", false}};
}

// The step that an object of tokenizer.json stands for; empty for one that is none of ours.
std::string step_of(const nlohmann::json& object) {
  const std::string type = object.value("type", "");
  if (type == "Digits") return object.value("individual_digits", false) ? std::string(digits) : "";
  if (type == "ByteLevel") {
    if (object.value("add_prefix_space", true)) return "";
    return std::string(object.value("use_regex", true) ? words : bytes);
  }
  if (type == "Split" && object.value("behavior", "") == "Isolated" && !object.value("invert", false)) {
    return object.at("pattern").value("Regex", "");
  }
  return "";
}

}  // namespace

const PreTokenizer* find_pre_tokenizer(std::string_view name) {
  if (name == "llama3" || name == "llama-v3") name = "llama-bpe";
  const auto found =
      std::find_if(known.begin(), known.end(), [&](const PreTokenizer& pre) { return pre.name == name; });
  return found == known.end() ? nullptr : &*found;
}

Json to_json(const PreTokenizer& pre) {
  if (pre.steps.size() == 1) return step_json(pre.steps.front());
  Json steps = Json::array();
  for (const std::string_view step : pre.steps) steps.push_back(step_json(step));
  return {{"type", "Sequence"}, {"pretokenizers", steps}};
}

const PreTokenizer* match_pre_tokenizer(const nlohmann::json& json) {
  if (!json.is_object()) return nullptr;
  std::vector<std::string> steps;
  if (json.value("type", "") == "Sequence") {
    for (const nlohmann::json& object : json.at("pretokenizers")) steps.push_back(step_of(object));
  } else {
    steps.push_back(step_of(json));
  }
  const auto found = std::find_if(known.begin(), known.end(), [&](const PreTokenizer& pre) {
    return std::equal(pre.steps.begin(), pre.steps.end(), steps.begin(), steps.end());
  });
  return found == known.end() ? nullptr : &*found;
}

}  // namespace tapetune::gguf
