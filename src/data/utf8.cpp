#include "data/utf8.h"

#include <cstdint>
#include <cstring>

namespace tapetune {

namespace {

// Calls invalid(begin, length) for every part that is none of a character, in order.
template <typename Invalid>
void walk(std::string_view text, const Invalid& invalid) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  for (std::size_t i = 0; i < text.size();) {
    if (i + sizeof(std::uint64_t) <= text.size()) {  // eight ASCII characters at once
      std::uint64_t eight;
      std::memcpy(&eight, text.data() + i, sizeof(eight));
      if ((eight & 0x8080808080808080) == 0) {
        i += sizeof(eight);
        continue;
      }
    }
    const unsigned lead = byte(i);
    if (lead < 0x80) {
      ++i;
      continue;
    }
    const std::size_t more = lead >= 0xc2 && lead <= 0xdf ? 1 : lead >= 0xe0 && lead <= 0xef ? 2 : 3;
    std::size_t good = lead >= 0xc2 && lead <= 0xf4 ? 1 : 0;  // bytes that may begin a character
    if (good == 1) {
      // The second byte rules out overlong forms, surrogates and what is beyond Unicode.
      const unsigned low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
      const unsigned high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
      if (i + 1 < text.size() && byte(i + 1) >= low && byte(i + 1) <= high) good = 2;
      while (good >= 2 && good <= more && i + good < text.size() && (byte(i + good) & 0xc0) == 0x80) ++good;
    }
    if (good == more + 1) {
      i += good;
    } else {
      const std::size_t length = good == 0 ? 1 : good;
      invalid(i, length);
      i += length;
    }
  }
}

}  // namespace

std::size_t count_invalid_utf8(std::string_view text) {
  std::size_t count = 0;
  walk(text, [&](std::size_t, std::size_t) { ++count; });
  return count;
}

std::string replace_invalid_utf8(std::string_view text) {
  std::string replaced;
  std::size_t copied = 0;
  walk(text, [&](std::size_t begin, std::size_t length) {
    replaced += text.substr(copied, begin - copied);
    replaced += "\xef\xbf\xbd";
    copied = begin + length;
  });
  replaced += text.substr(copied);
  return replaced;
}

}  // namespace tapetune
