#include "core/json.h"

#include <algorithm>

#include "core/error.h"

namespace tapetune {

Json parse_json(std::string_view text, std::string_view component, std::string_view where) {
  try {
    // Deep nesting would overflow the stack of whoever walks the tree later; nothing of ours nests deeper than a few
    // levels.
    constexpr int deepest = 64;
    return Json::parse(text, [&](int depth, Json::parse_event_t, Json&) {
      if (depth > deepest)
        fail(component, "{}: is nested deeper than {} levels; download or copy the file again.", where, deepest);
      return true;
    });
  } catch (const Json::parse_error& error) {
    const std::size_t at = std::min(error.byte, text.size());
    const auto line = 1 + std::count(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(at), '\n');
    // Python writes these words for numbers that are none; JSON has no such thing and neither have we.
    for (const std::string_view word : {"NaN", "Infinity"}) {
      const std::size_t found = text.find(word, at < 12 ? 0 : at - 12);
      if (found != std::string_view::npos && found <= at) {
        fail(component, "{}: line {} has {}, which is not valid JSON; give a finite number.", where, line, word);
      }
    }
    fail(component, "{}: is not JSON (line {}); download or copy the file again.", where, line);
  } catch (const Json::exception& error) {  // a number out of range
    fail(component, "{}: is not readable JSON: {}.", where, error.what());
  }
}

Json from_text(std::string_view text) { return Json::parse(text); }

std::string to_text(const Json& json, int indent) {
  return json.dump(indent, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
}

}  // namespace tapetune
