// JSON files with errors that name the file and the line.
#pragma once

#include <nlohmann/json.hpp>

#include <string>
#include <string_view>

namespace tapetune {

// Keeps the order of keys, so that a file that is read and written again stays recognisable.
using Json = nlohmann::ordered_json;

// Parses text; `where` (a file name, usually) opens the message when it is not JSON.
Json parse_json(std::string_view text, std::string_view component, std::string_view where);

// Json::parse and dump, compiled once: in every file that calls them they would cost three seconds. The first is for
// text of our own making; the second writes U+FFFD for what is not UTF-8, as file names may be: a checkpoint must not
// fail for a name.
Json from_text(std::string_view text);
std::string to_text(const Json& json, int indent = -1);

}  // namespace tapetune
