#include "data/split_points.h"

#include <algorithm>
#include <optional>
#include <string>

#include "data/utf8.h"

namespace tapetune {

namespace {

using nlohmann::json;

constexpr std::string_view llama3 =
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| "
    "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+"
    "|\\s+(?!\\S)|\\s+";
constexpr std::string_view qwen2 =
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+"
    "|\\s+(?!\\S)|\\s+";
constexpr std::string_view space_piece = "\xe2\x96\x81";  // ▁
constexpr char32_t space_mark = U'\u2581';

const json& member(const json& object, const char* key) {
  static const json none;
  const auto found = object.is_object() ? object.find(key) : object.end();
  return object.is_object() && found != object.end() ? *found : none;
}

bool is(const json& object, const char* key, const json& value) { return member(object, key) == value; }

bool null_or_false(const json& value) {
  return value.is_null() || value == false || (value.is_string() && value.get_ref<const std::string&>().empty());
}

// The character that ends before `end`, where it is valid UTF-8.
std::optional<char32_t> character_before(std::string_view text, std::size_t end) {
  std::size_t begin = end - 1;
  while (begin > 0 && end - begin < 4 && (static_cast<unsigned char>(text[begin]) & 0xc0) == 0x80) --begin;
  const std::string_view bytes = text.substr(begin, end - begin);
  const auto lead = static_cast<unsigned char>(bytes[0]);
  const std::size_t length = lead < 0x80 ? 1 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
  if (length != bytes.size() || count_invalid_utf8(bytes) != 0) return std::nullopt;
  char32_t code = length == 1 ? lead : lead & (0xffU >> (length + 1));
  for (std::size_t i = 1; i < length; ++i) code = code << 6 | (static_cast<unsigned char>(bytes[i]) & 0x3fU);
  return code;
}

// Unicode's White_Space beyond ASCII.
bool wide_space(char32_t c) {
  return c == 0x85 || c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 ||
         c == 0x202f || c == 0x205f || c == 0x3000;
}

// Whether the last character before `end` is white space to a regular expression; what is no UTF-8 becomes U+FFFD.
bool ends_with_space(std::string_view text, std::size_t end) {
  const std::optional<char32_t> last = character_before(text, end);
  return last && (*last == ' ' || (*last >= '\t' && *last <= '\r') || wide_space(*last));
}

bool printable(unsigned c) { return c > 0x20 && c < 0x7f; }

bool gpt2_byte_level(const json& step) {
  return is(step, "type", "ByteLevel") && is(step, "add_prefix_space", false) && !is(step, "use_regex", false);
}

// The expressions of Llama 3 and Qwen 2 have "\s*[\r\n]+"; to GPT-2's a line end is white space as any other.
bool splits_after_lines(const json& pre) {
  const json& steps = member(pre, "pretokenizers");
  return steps.is_array() && !steps.empty() && is(steps[0], "type", "Split");
}

bool known_byte_level(const json& pre) {
  if (gpt2_byte_level(pre)) return true;
  const json& steps = member(pre, "pretokenizers");
  if (!is(pre, "type", "Sequence") || !steps.is_array() || steps.size() != 2) return false;
  // Digits apart make splits finer, and never one less.
  if (is(steps[0], "type", "Digits")) return gpt2_byte_level(steps[1]);
  const json& regex = member(member(steps[0], "pattern"), "Regex");
  return is(steps[0], "type", "Split") && is(steps[0], "behavior", "Isolated") && is(steps[0], "invert", false) &&
         (regex == llama3 || regex == qwen2) && is(steps[1], "type", "ByteLevel") &&
         is(steps[1], "add_prefix_space", false) && is(steps[1], "use_regex", false);
}

bool prepends_and_replaces(const json& normalizer) {
  const json& steps = member(normalizer, "normalizers");
  return is(normalizer, "type", "Sequence") && steps.is_array() && steps.size() == 2 &&
         is(steps[0], "type", "Prepend") && is(steps[0], "prepend", space_piece) && is(steps[1], "type", "Replace") &&
         is(member(steps[1], "pattern"), "String", " ") && is(steps[1], "content", space_piece);
}

}  // namespace

SplitPoints::SplitPoints(const json& tokenizer) {
  const json &model = member(tokenizer, "model"), &normalizer = member(tokenizer, "normalizer"),
             &pre = member(tokenizer, "pre_tokenizer"), &added = member(tokenizer, "added_tokens");
  if (!is(model, "type", "BPE") || !null_or_false(member(model, "dropout")) ||
      !null_or_false(member(model, "continuing_subword_prefix")) || !null_or_false(member(model, "end_of_word_suffix")))
    return;
  bool normalized = false;
  for (const json& token : added.is_array() ? added : json::array()) {
    // A token that takes in what is around it, or holds what we split at, may lie across a split point.
    for (const char* key : {"lstrip", "rstrip", "single_word"}) {
      if (!null_or_false(member(token, key))) return;
    }
    const json& content = member(token, "content");
    if (!content.is_string() || content.get_ref<const std::string&>().empty()) return;
    const std::string& text = content.get_ref<const std::string&>();
    if (text.find_first_of(" \n\r") != std::string::npos) return;
    begins_added_[static_cast<unsigned char>(text.front())] = ends_added_[static_cast<unsigned char>(text.back())] =
        true;
    normalized = normalized || !null_or_false(member(token, "normalized"));
  }
  const bool composes = is(normalizer, "type", "NFC");  // never over a space
  if ((normalizer.is_null() || composes) && known_byte_level(pre)) {
    byte_level(splits_after_lines(pre) ? AfterLine::last : AfterLine::lone);
  } else if (prepends_and_replaces(normalizer) && pre.is_null() && !normalized) {
    drops_space_ = drops_prefix_ = true;
    sentence_pieces(model);
  } else if (normalizer.is_null() && is(pre, "type", "Metaspace") && is(pre, "replacement", space_piece) &&
             member(pre, "prepend_scheme").is_string()) {
    drops_prefix_ = !is(pre, "prepend_scheme", "never");  // a text that begins with a space gets no other
    sentence_pieces(model);
  }
}

void SplitPoints::byte_level(AfterLine after_line) {
  any_ = carriages_ = true;
  after_line_ = after_line;
  for (unsigned c = 0; c < 128; ++c) {
    before_space_[c] = printable(c);
    // Llama 3 takes line ends together with punctuation before them.
    before_line_[c] = (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
  }
}

void SplitPoints::sentence_pieces(const json& model) {
  const json& vocab = member(model, "vocab");
  // Were "▁" unknown, it could be fused with an unknown character before it; were texts looked up whole, a part could
  // be found that the whole does not have.
  if (!vocab.is_object() || !vocab.contains(space_piece) || !null_or_false(member(model, "ignore_merges"))) return;
  const bool bytes = member(model, "byte_fallback") == true;
  const bool known_lines = vocab.contains("\n") || (bytes && vocab.contains("<0x0A>"));
  any_ = wide_lines_ = true;
  for (unsigned c = 0; c < 128; ++c) before_space_[c] = before_line_[c] = printable(c);
  before_line_['\r'] = true;
  for (auto entry = vocab.begin(); entry != vocab.end(); ++entry) {
    const std::string& piece = entry.key();
    for (std::size_t i = 1; i < piece.size(); ++i) {
      const bool space = piece.compare(i, space_piece.size(), space_piece) == 0;
      if (!space && piece[i] != '\n') continue;
      const std::optional<char32_t> before = character_before(piece, i);
      if (!before) {
        any_ = false;
        return;
      }
      if (*before < 128) (space ? before_space_ : before_line_)[*before] = false;
      if (*before >= 128) (space ? never_before_space_ : never_before_line_).push_back(*before);
    }
  }
  const bool joined = std::ranges::find(never_before_line_, space_mark) != never_before_line_.end();
  if (!known_lines || joined) {
    before_line_.fill(false);
    wide_lines_ = false;
  }
  never_before_space_.push_back(space_mark);
  never_before_line_.push_back(space_mark);
  std::ranges::sort(never_before_space_);
  std::ranges::sort(never_before_line_);
}

bool SplitPoints::allowed(std::string_view text, std::size_t at) const {
  const bool space = text[at] == ' ';
  if (!space && text[at] != '\n' && !(carriages_ && text[at] == '\r')) return false;
  const auto before = static_cast<unsigned char>(text[at - 1]);
  // Where the tokenizer brings a space, it does so after an added token as well, and not before one.
  if (space && drops_space_ && begins_added_[static_cast<unsigned char>(text[at + 1])]) return false;
  if (drops_prefix_ && ends_added_[before]) return false;
  if (before < 128) return (space ? before_space_ : before_line_)[before];
  if (!space && !wide_lines_) return false;
  const std::optional<char32_t> wide = character_before(text, at);
  return wide && !wide_space(*wide) &&
         !std::ranges::binary_search(space ? never_before_space_ : never_before_line_, *wide);
}

std::size_t SplitPoints::next(std::string_view text, std::size_t from) const {
  if (!any_) return std::string_view::npos;
  for (std::size_t i = std::max<std::size_t>(from, 1); i + 1 < text.size(); ++i) {
    if (text[i] <= ' ' && text[i] >= 0 && allowed(text, i)) return i;
  }
  return std::string_view::npos;
}

// Between "\n" and what follows. Only white space can stand in a match with a "\n" before it, and in "\s*[\r\n]+" only
// up to the last line end of the white space. GPT-2's "\s+(?!\S)" keeps the last character of white space apart where
// text follows but not where the text ends, so that it must be the only one.
bool SplitPoints::allowed_after_line(std::string_view text, std::size_t at) const {
  if (after_line_ == AfterLine::lone && (at < 2 || ends_with_space(text, at - 1))) return false;
  for (std::size_t i = at; i + 4 < at + undecided;) {
    const auto lead = static_cast<unsigned char>(text[i]);
    i += lead < 0x80 ? 1 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
    if (!ends_with_space(text, i)) return true;
    if (after_line_ == AfterLine::lone || lead == '\n' || lead == '\r') return false;
  }
  return false;
}

std::size_t SplitPoints::next_piece(std::string_view text, std::size_t from) const {
  if (!any_) return std::string_view::npos;
  for (std::size_t i = std::max<std::size_t>(from, 1); i + 1 < text.size(); ++i) {
    if (text[i] > ' ' || text[i] < 0) continue;
    if (allowed(text, i)) return i;
    const bool line = text[i] == '\n' && after_line_ != AfterLine::never && i + 1 + undecided <= text.size();
    if (line && allowed_after_line(text, i + 1)) return i + 1;
  }
  return std::string_view::npos;
}

SplitPoints::Part SplitPoints::continued(std::string_view part) const {
  if (part.empty()) return {part};
  if (part[0] == ' ') return {drops_space_ ? part.substr(1) : part};
  return {part, drops_prefix_};
}

}  // namespace tapetune
