#include "checkpoint/carry.h"

#include <algorithm>

#include "core/error.h"
#include "core/file.h"
#include "core/json.h"
#include "core/log.h"

namespace tapetune {
namespace fs = std::filesystem;

namespace {

// What transformers, vLLM and llama.cpp look for.
constexpr std::string_view carried_names[] = {"generation_config.json",  "tokenizer.json",    "tokenizer.model",
                                              "tokenizer_config.json",   "vocab.json",        "merges.txt",
                                              "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"};

// models--OWNER--NAME/blobs, for models--OWNER--NAME/snapshots/REVISION and folders in it; empty: not in a hub cache.
fs::path blobs_beside(const fs::path& folder) {
  for (fs::path at = folder; at.has_relative_path(); at = at.parent_path()) {
    if (at.filename() == "snapshots") return at.parent_path() / "blobs";
  }
  return {};
}

// The Python file that auto_map's "module.Class" is in; empty where it is none of this folder, as "owner/name--module".
std::string code_file(const Json& reference) {
  if (!reference.is_string()) return "";
  const std::string& text = reference.get_ref<const std::string&>();
  const std::size_t dot = text.rfind('.');
  return dot == std::string::npos || text.find("--") != std::string::npos ? "" : text.substr(0, dot) + ".py";
}

// The first reference of an auto_map without its file among these; null: there is none.
Json first_without_file(const Json& auto_map, const std::map<std::string, std::string>& files) {
  if (!auto_map.is_object()) return auto_map;
  for (const auto& [kind, value] : auto_map.items()) {
    for (const Json& each : value.is_array() ? value : Json::array({value})) {
      if (!each.is_null() && !files.contains(code_file(each))) return each;  // null: no slow, or no fast tokenizer
    }
  }
  return {};
}

}  // namespace

bool is_carried(std::string_view name) { return std::ranges::find(carried_names, name) != std::end(carried_names); }

std::vector<std::string> files_to_carry(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code status;
  for (const std::string_view name : carried_names) {
    const fs::path file = folder / name;
    if (!fs::exists(file, status)) continue;
    if (fs::is_symlink(file, status)) {
      const fs::path real = fs::canonical(file, status), home = fs::canonical(folder, status);
      const fs::path blobs = blobs_beside(home);
      if (!is_inside(real, home) && (blobs.empty() || !is_inside(real, blobs))) {
        fail("checkpoint",
             "{}: is a link to {}, outside of the model's folder, and what is there is not copied; replace the link by "
             "a copy of the file.",
             file.string(), real.string());
      }
    }
    names.emplace_back(name);
  }
  return names;
}

void drop_foreign_code(std::map<std::string, std::string>& files) {
  for (const char* name : {"config.json", "tokenizer_config.json"}) {
    const auto found = files.find(name);
    // Most have none; what is no JSON is carried as it is.
    if (found == files.end() || found->second.find("\"auto_map\"") == std::string::npos) continue;
    Json json = Json::parse(found->second, nullptr, /*allow_exceptions=*/false);
    if (!json.is_object() || !json.contains("auto_map")) continue;
    const Json missing = first_without_file(json["auto_map"], files);
    if (missing.is_null()) continue;
    note("{}: auto_map is left out, because it names {}, whose Python code is not part of the new folder", name,
         to_text(missing));
    json.erase("auto_map");
    // A class of that code would not be found either.
    if (json.contains("tokenizer_class") && files.contains("tokenizer.json")) {
      json["tokenizer_class"] = "PreTrainedTokenizerFast";
    }
    found->second = to_text(json, 2) + "\n";
  }
}

Json tokenizer_settings(const fs::path& folder) {
  const fs::path file = folder / "tokenizer_config.json";
  std::error_code status;
  if (folder.empty() || !fs::exists(file, status)) return Json::object();
  Json json = parse_json(read_text(file), "merge", file.string());
  return json.is_object() ? json : Json::object();
}

}  // namespace tapetune
