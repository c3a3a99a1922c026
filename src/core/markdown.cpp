#include "core/markdown.h"

#include <algorithm>

namespace tapetune {

namespace {

// The longest run of backticks; what encloses a text needs more.
std::size_t longest_fence(std::string_view text) {
  std::size_t longest = 0, run = 0;
  for (const char c : text) longest = std::max(longest, run = c == '`' ? run + 1 : 0);
  return longest;
}

bool is_word(std::string_view text, std::size_t at) {
  if (at >= text.size()) return false;
  const auto c = static_cast<unsigned char>(text[at]);
  return c >= 0x80 || (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
}

}  // namespace

std::string one_line(std::string_view text) {
  std::string line(text);
  std::replace_if(line.begin(), line.end(), [](unsigned char c) { return c < 0x20 || c == 0x7F; }, ' ');
  return line;
}

std::string markdown_text(std::string_view text) {
  constexpr std::string_view special = "\\`*[]<>|&~#!$";
  const std::string line = one_line(text);
  std::string escaped;
  for (std::size_t i = 0; i < line.size(); ++i) {
    // Within a word an underscore is only that.
    const bool inside = i > 0 && is_word(line, i - 1) && is_word(line, i + 1);
    if (special.find(line[i]) != std::string_view::npos || (line[i] == '_' && !inside)) escaped += '\\';
    escaped += line[i];
  }
  return escaped;
}

std::string markdown_code(std::string_view text) {
  const std::string line = one_line(text);
  const std::string fence(longest_fence(line) + 1, '`');
  std::string code;
  for (const char c : line) {
    if (c == '|') code += '\\';  // which a table takes away again
    code += c;
  }
  const bool padded = code.empty() || code.front() == '`' || code.back() == '`';
  return padded ? fence + " " + code + " " + fence : fence + code + fence;
}

std::string markdown_block(std::string_view language, std::string_view text) {
  const std::string fence(std::max<std::size_t>(3, longest_fence(text) + 1), '`');
  std::string block = fence;
  block.append(language).append("\n").append(text);
  if (!text.ends_with('\n')) block += '\n';
  return block + fence + "\n";
}

}  // namespace tapetune
