// Invalid UTF-8: where it is, as Rust and Python see it.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace tapetune {

// Invalid parts, each as long as it could still have become a character: what U+FFFD stands for once.
std::size_t count_invalid_utf8(std::string_view text);
std::string replace_invalid_utf8(std::string_view text);

}  // namespace tapetune
