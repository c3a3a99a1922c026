// JSON files with errors that name the file and the line.
#pragma once

#include <nlohmann/json.hpp>

#include <string_view>

namespace tapetune {

// Keeps the order of keys, so that a file that is read and written again stays recognisable.
using Json = nlohmann::ordered_json;

// Parses text; `where` (a file name, usually) opens the message when it is not JSON.
Json parse_json(std::string_view text, std::string_view component, std::string_view where);

}  // namespace tapetune
