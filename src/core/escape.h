// Text of files and of other processes, made safe to print: a terminal obeys control characters.
#pragma once

#include <string>
#include <string_view>

namespace tapetune {

// One line: control characters, line ends, bidirectional overrides and invalid UTF-8 become visible escapes (\n,
// \u001b, \xff). Within JSON the escapes of valid text are JSON's own, so that it keeps its meaning.
std::string printable(std::string_view text);
// The same, but line feeds and tabs stay.
std::string printable_lines(std::string_view text);

}  // namespace tapetune
