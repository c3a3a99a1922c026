// tokenizer.json through Hugging Face's tokenizers, with BOS and EOS as tokenizer_config.json says.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tapetune {

using TokenIds = std::vector<std::int64_t>;

// A text that is tokenized at once may have this many bytes: the tokenizers crate takes 220 bytes of memory a byte
// where each one becomes a token, and 60 to 100 for ordinary text.
constexpr std::size_t longest_text = 8 << 20;

class TokenStream;

class Tokenizer {
 public:
  // folder: a checkpoint, or any folder with tokenizer.json (and tokenizer_config.json).
  static Tokenizer open(const std::filesystem::path& folder);
  ~Tokenizer();
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;

  // Invalid UTF-8 becomes U+FFFD. A text longer than longest_text is refused. special: with the tokens that the
  // checkpoint puts around a text (BOS, EOS).
  TokenIds encode(std::string_view text, bool special = true) const;
  // A text to go on from: without the EOS that some checkpoints put behind every text.
  TokenIds encode_prompt(std::string_view text) const;
  // The same as encode for many texts, on all cores.
  std::vector<TokenIds> encode_batch(std::span<const std::string_view> texts, bool special = true) const;
  std::string decode(std::span<const std::int64_t> ids, bool skip_special = true) const;
  // For streaming: text comes out as soon as it is whole UTF-8.
  TokenStream stream(bool skip_special = true) const;

  std::optional<std::int64_t> bos() const;
  std::optional<std::int64_t> eos() const;
  std::int64_t size() const;  // one more than the largest id

 private:
  friend class TokenStream;
  struct State;
  explicit Tokenizer(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

class TokenStream {
 public:
  ~TokenStream();
  TokenStream(TokenStream&&) noexcept;
  TokenStream& operator=(TokenStream&&) noexcept;

  // The text that these tokens complete; empty while a character is still open.
  std::string push(std::span<const std::int64_t> ids);
  // What is left when no more tokens come.
  std::string finish();

 private:
  friend class Tokenizer;
  struct State;
  explicit TokenStream(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace tapetune
