// Names of others in Markdown files that we write: a name must not end a table's cell, nor begin a link or HTML.
#pragma once

#include <string>
#include <string_view>

namespace tapetune {

// With a space for every control character, so that it stays in its line.
std::string one_line(std::string_view text);
// As text: every character that means something in Markdown is escaped.
std::string markdown_text(std::string_view text);
// As a code span, also within a table.
std::string markdown_code(std::string_view text);
// As a code block, whatever fences the text has. language: as "sh".
std::string markdown_block(std::string_view language, std::string_view text);

}  // namespace tapetune
