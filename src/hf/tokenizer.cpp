#include "hf/tokenizer.h"

#include <algorithm>
#include <limits>

#include "core/error.h"
#include "core/file.h"
#include "core/json.h"
#include "core/memory.h"
#include "hf_bridge.h"
#include "rust/cxx.h"

namespace tapetune {
namespace fs = std::filesystem;

namespace {

rust::Slice<const std::uint8_t> slice(std::string_view text) {
  return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()};
}

std::vector<std::uint32_t> narrow(std::span<const std::int64_t> ids) {
  std::vector<std::uint32_t> narrowed;
  narrowed.reserve(ids.size());
  for (const std::int64_t id : ids) {
    if (id < 0 || id > std::numeric_limits<std::uint32_t>::max()) fail("tokenizer", "{} is not a token id.", id);
    narrowed.push_back(static_cast<std::uint32_t>(id));
  }
  return narrowed;
}

// A text, or the content of an object: "<s>" or {"content": "<s>", …}; empty where it is neither.
std::string text_of(const Json& config, const char* key) {
  const auto found = config.find(key);
  if (found == config.end()) return {};
  if (found->is_object()) return text_of(*found, "content");
  return found->is_string() ? found->get<std::string>() : std::string();
}

std::optional<bool> flag(const Json& config, const char* key) {
  const auto found = config.find(key);
  if (found == config.end() || !found->is_boolean()) return std::nullopt;
  return found->get<bool>();
}

}  // namespace

struct Tokenizer::State {
  rust::Box<hf::bridge::Tokenizer> inner;
  std::string where;
  std::optional<std::int64_t> bos, eos;
  // Unset: tokenizer.json's own post-processor decides.
  std::optional<bool> add_bos, add_eos;

  bool post_processed(bool special) const { return special && !add_bos && !add_eos; }

  template <typename Ids>
  TokenIds framed(const Ids& ids, bool special) const {
    const bool own = special && !post_processed(special);
    TokenIds framed;
    framed.reserve(ids.size() + 2);
    if (own && add_bos.value_or(false) && bos) framed.push_back(*bos);
    framed.insert(framed.end(), ids.begin(), ids.end());
    if (own && add_eos.value_or(false) && eos) framed.push_back(*eos);
    return framed;
  }

  [[noreturn]] void fail_with(const rust::Error& error) const { fail("tokenizer", "{}: {}.", where, error.what()); }
};

Tokenizer::Tokenizer(std::unique_ptr<State> state) : state_(std::move(state)) {}
Tokenizer::~Tokenizer() = default;
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;

Tokenizer Tokenizer::open(const fs::path& folder) {
  const fs::path path = folder / "tokenizer.json";
  std::error_code status;
  if (!fs::exists(path, status)) {
    fail("tokenizer",
         "{}: no such file; copy tokenizer.json from the original model (transformers' save_pretrained writes it).",
         path.string());
  }
  const std::string json = read_text(path);
  std::unique_ptr<State> state;
  try {
    state.reset(new State{hf::bridge::open_tokenizer(slice(json)), path.string(), {}, {}, {}, {}});
  } catch (const rust::Error& error) {
    fail("tokenizer", "{}: cannot be read ({}); copy it again from the original model.", path.string(), error.what());
  }
  trim_memory();  // parsing a vocabulary leaves more holes behind than the vocabulary takes
  const fs::path config_path = folder / "tokenizer_config.json";
  if (fs::exists(config_path, status)) {
    const Json config = parse_json(read_text(config_path), "tokenizer", config_path.string());
    if (!config.is_object()) fail("tokenizer", "{}: must be a JSON object; copy it again.", config_path.string());
    const auto id_of = [&](const char* key) -> std::optional<std::int64_t> {
      const std::string token = text_of(config, key);
      const std::int64_t id = token.empty() ? -1 : state->inner->token_id(rust::Str(token));
      return id < 0 ? std::nullopt : std::optional(id);
    };
    state->bos = id_of("bos_token");
    state->eos = id_of("eos_token");
    state->add_bos = flag(config, "add_bos_token");
    state->add_eos = flag(config, "add_eos_token");
    const std::string kind = text_of(config, "tokenizer_class");
    // transformers' Llama tokenizers add BOS unless told otherwise, whatever tokenizer.json's post-processor says.
    if (kind.rfind("LlamaTokenizer", 0) == 0 && !state->add_bos) state->add_bos = true;
  }
  return Tokenizer(std::move(state));
}

TokenIds Tokenizer::encode(std::string_view text, bool special) const {
  try {
    return state_->framed(state_->inner->encode(slice(text), longest_text, state_->post_processed(special)), special);
  } catch (const rust::Error& error) {
    state_->fail_with(error);
  }
}

TokenIds Tokenizer::encode_prompt(std::string_view text) const {
  const TokenIds frame = encode("");
  TokenIds tokens = encode(text);
  if (!frame.empty() && eos() && frame.back() == *eos()) tokens.pop_back();  // an EOS that the user wrote stays
  return tokens;
}

std::vector<TokenIds> Tokenizer::encode_batch(std::span<const std::string_view> texts, bool special) const {
  std::string joined;
  std::vector<std::uint64_t> ends;
  ends.reserve(texts.size());
  for (const std::string_view text : texts) {
    joined += text;
    ends.push_back(joined.size());
  }
  try {
    const hf::bridge::EncodedBatch batch = state_->inner->encode_batch(slice(joined), {ends.data(), ends.size()},
                                                                       longest_text, state_->post_processed(special));
    std::vector<TokenIds> encoded;
    encoded.reserve(texts.size());
    std::size_t begin = 0;
    for (const std::uint64_t end : batch.ends) {
      encoded.push_back(state_->framed(std::span(batch.ids.data() + begin, end - begin), special));
      begin = end;
    }
    return encoded;
  } catch (const rust::Error& error) {
    state_->fail_with(error);
  }
}

std::string Tokenizer::decode(std::span<const std::int64_t> ids, bool skip_special) const {
  const std::vector<std::uint32_t> narrowed = narrow(ids);
  try {
    return std::string(state_->inner->decode({narrowed.data(), narrowed.size()}, skip_special));
  } catch (const rust::Error& error) {
    state_->fail_with(error);
  }
}

std::optional<std::int64_t> Tokenizer::bos() const { return state_->bos; }
std::optional<std::int64_t> Tokenizer::eos() const { return state_->eos; }
std::int64_t Tokenizer::size() const { return static_cast<std::int64_t>(state_->inner->size()); }

struct TokenStream::State {
  rust::Box<hf::bridge::TokenStream> inner;
};

TokenStream::TokenStream(std::unique_ptr<State> state) : state_(std::move(state)) {}
TokenStream::~TokenStream() = default;
TokenStream::TokenStream(TokenStream&&) noexcept = default;
TokenStream& TokenStream::operator=(TokenStream&&) noexcept = default;

TokenStream Tokenizer::stream(bool skip_special) const {
  return TokenStream(std::make_unique<TokenStream::State>(TokenStream::State{state_->inner->stream(skip_special)}));
}

std::string TokenStream::push(std::span<const std::int64_t> ids) {
  const std::vector<std::uint32_t> narrowed = narrow(ids);
  try {
    return std::string(state_->inner->push({narrowed.data(), narrowed.size()}));
  } catch (const rust::Error& error) {
    fail("tokenizer", "decoding: {}.", error.what());
  }
}

std::string TokenStream::finish() {
  try {
    return std::string(state_->inner->finish());
  } catch (const rust::Error& error) {
    fail("tokenizer", "decoding: {}.", error.what());
  }
}

}  // namespace tapetune
