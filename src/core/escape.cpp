#include "core/escape.h"

#include <fmt/format.h>

#include <cstdint>

namespace tapetune {

namespace {

struct Character {
  std::uint32_t code = 0;
  std::size_t size = 0;  // in bytes; 0: invalid
};

// The character at the beginning of a text that is not empty, by table 3-7 of the Unicode standard.
Character first_character(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<std::uint8_t>(text[i]); };
  const std::uint8_t lead = byte(0);
  if (lead < 0x80) return {lead, 1};
  if (lead < 0xC2 || lead > 0xF4) return {};
  const std::size_t size = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  if (text.size() < size) return {};
  const std::uint8_t least = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  const std::uint8_t most = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  if (byte(1) < least || byte(1) > most) return {};
  std::uint32_t code = lead & (0xFFU >> (size + 1));
  for (std::size_t i = 1; i < size; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return {};
    code = code << 6 | (byte(i) & 0x3F);
  }
  return {code, size};
}

// C0, DEL, C1, line and paragraph separators, and what changes the direction of the text around it.
bool is_unsafe(std::uint32_t code) {
  return code < 0x20 || (code >= 0x7F && code < 0xA0) || code == 0x061C || code == 0x200E || code == 0x200F ||
         (code >= 0x2028 && code <= 0x202E) || (code >= 0x2066 && code <= 0x2069);
}

std::string escaped_text(std::string_view text, bool keep_lines) {
  std::string out;
  out.reserve(text.size());
  for (std::size_t i = 0; i < text.size();) {
    const Character c = first_character(text.substr(i));
    const bool keeps = keep_lines && (text[i] == '\n' || text[i] == '\t');
    if (c.size == 0) {
      out += fmt::format("\\x{:02x}", static_cast<std::uint8_t>(text[i++]));
      continue;
    }
    if (!is_unsafe(c.code) || keeps) {
      out += text.substr(i, c.size);
    } else if (c.code == '\n' || c.code == '\t' || c.code == '\r') {
      out += c.code == '\n' ? "\\n" : c.code == '\t' ? "\\t" : "\\r";
    } else {
      out += fmt::format("\\u{:04x}", c.code);
    }
    i += c.size;
  }
  return out;
}

}  // namespace

std::string printable(std::string_view text) { return escaped_text(text, false); }
std::string printable_lines(std::string_view text) { return escaped_text(text, true); }

}  // namespace tapetune
