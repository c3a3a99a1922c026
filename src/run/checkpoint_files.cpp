#include "run/checkpoint_files.h"

#include <set>

#include "checkpoint/folder.h"
#include "core/error.h"
#include "core/file.h"
#include "core/json.h"
#include "hf/hash.h"
#include "run/run_folder.h"

namespace tapetune {

namespace fs = std::filesystem;

namespace {

constexpr const char* hashes_file = "hashes.json";

// What the first file that is not as it was written has become; empty: none.
std::string changed_since_hashed(const fs::path& checkpoint) {
  const fs::path list = checkpoint / hashes_file;
  const Json hashes = parse_json(read_text(list), "checkpoint", list.string());
  if (!hashes.is_object() || hashes.empty()) return fmt::format("{} names no files", hashes_file);
  for (const auto& [name, about] : hashes.items()) {
    if (!about.is_object() || !about.contains("bytes") || !about["bytes"].is_number_unsigned() ||
        !about.contains("blake3") || !about["blake3"].is_string() || name.find('/') != std::string::npos) {
      return fmt::format("{} has no size and hash of {}", hashes_file, name);
    }
    const fs::path file = checkpoint / name;
    std::error_code status;
    if (!fs::is_regular_file(file, status)) return fmt::format("{} is missing", name);
    const std::uintmax_t bytes = fs::file_size(file, status);
    if (bytes != about["bytes"].get<std::uintmax_t>()) {
      return fmt::format("{} has {} bytes, but {} were written", name, bytes, about["bytes"].get<std::uintmax_t>());
    }
    if (hash_of_file(file) != about["blake3"].get_ref<const std::string&>()) {
      return fmt::format("{} is not what was written: its BLAKE3 hash differs", name);
    }
  }
  return "";
}

}  // namespace

std::string hash_of_file(const fs::path& path) {
  constexpr std::size_t at_once = std::size_t{4} << 20;
  Hasher hasher;
  if (fs::file_size(path) == 0) return hasher.hex();
  const std::shared_ptr<const MappedFile> file = MappedFile::open(path);
  for (std::size_t begin = 0; begin < file->bytes().size(); begin += at_once) {
    const auto piece = file->bytes().subspan(begin, std::min(at_once, file->bytes().size() - begin));
    hasher.add(piece);
    file->release(piece);
  }
  return hasher.hex();
}

void write_hashes(const fs::path& checkpoint) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(checkpoint)) names.insert(entry.path().filename().string());
  Json hashes = Json::object();
  for (const std::string& name : names) {
    hashes[name] = {{"bytes", fs::file_size(checkpoint / name)}, {"blake3", hash_of_file(checkpoint / name)}};
  }
  OutputFile out(checkpoint / hashes_file);
  out.write(to_text(hashes, 2) + "\n");
  out.finish();
}

std::string words_of(const std::exception& error) {
  std::string text = error.what();
  if (const std::size_t end = text.find("] "); text.starts_with('[') && end != std::string::npos)
    text.erase(0, end + 2);
  if (text.ends_with('.')) text.pop_back();
  return text;
}

bool has_hashes(const fs::path& checkpoint) {
  std::error_code status;
  return fs::exists(checkpoint / hashes_file, status);
}

std::string damage_of(const fs::path& checkpoint) {
  try {
    if (has_hashes(checkpoint)) {
      if (std::string changed = changed_since_hashed(checkpoint); !changed.empty()) return changed;
    }
    std::error_code status;
    for (const char* name : {"state.json", "adapter_model.safetensors", "optimizer.safetensors"}) {
      if (!fs::is_regular_file(checkpoint / name, status)) return fmt::format("{} is missing", name);
    }
    const fs::path file = checkpoint / "state.json";
    const Json state = parse_json(read_text(file), "checkpoint", file.string());
    const auto step = state.is_object() ? state.find("step") : state.end();
    if (step == state.end() || !step->is_number_integer()) return "state.json has no step";
    if (const auto named = RunFolder::step_of(checkpoint); named && *named != step->get<std::int64_t>()) {
      return fmt::format("state.json is of step {}", step->get<std::int64_t>());
    }
    for (const char* name : {"adapter_model.safetensors", "optimizer.safetensors"}) {
      StoredTensors stored;
      map_safetensors(checkpoint / name, stored);
    }
  } catch (const Interrupted&) {
    throw;
  } catch (const std::exception& error) {
    return words_of(error);
  }
  return "";
}

}  // namespace tapetune
