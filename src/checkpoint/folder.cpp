#include "checkpoint/folder.h"

#include <set>

#include "core/error.h"
#include "core/json.h"

namespace tapetune {
namespace fs = std::filesystem;

namespace {

constexpr const char* whole_name = "model.safetensors";
constexpr const char* index_name = "model.safetensors.index.json";

bool is_gguf(const fs::path& path) {
  std::error_code status;
  return path.extension() == ".gguf" && fs::is_regular_file(path, status);
}

}  // namespace

std::map<std::string, std::string> parse_index(std::string_view json, std::string_view where) {
  const Json root = parse_json(json, "checkpoint", where);
  const auto found = root.is_object() ? root.find("weight_map") : root.end();
  if (found == root.end() || !found->is_object() || found->empty()) {
    fail("checkpoint", "{}: has no weight_map; download or copy it again.", where);
  }
  std::map<std::string, std::string> shards;
  for (const auto& [name, shard] : found->items()) {
    // A shard is a file beside the index; anything else could reach out of the folder.
    if (!shard.is_string() || shard.get_ref<const std::string&>().empty() ||
        shard.get_ref<const std::string&>().find('/') != std::string::npos) {
      fail("checkpoint", "{}: weight_map[\"{}\"] must be a file name.", where, name);
    }
    shards.emplace(name, shard.get<std::string>());
  }
  return shards;
}

void map_safetensors(const fs::path& path, StoredTensors& tensors) {
  const std::shared_ptr<const MappedFile> file = MappedFile::open(path);
  SafetensorsHeader header = read_safetensors_header(file->bytes(), path.string());
  for (TensorEntry& entry : header.tensors) {
    const auto bytes = file->bytes().subspan(header.data_start + entry.begin, entry.end - entry.begin);
    std::string name = entry.name;
    if (!tensors.emplace(name, StoredTensor{std::move(entry), file, bytes}).second) {
      fail("checkpoint", "{}: tensor {} is in another shard too; remove shards of an older checkpoint.", path.string(),
           name);
    }
  }
}

std::vector<fs::path> weight_files(const fs::path& folder) {
  std::error_code status;
  if (fs::exists(folder / whole_name, status)) return {folder / whole_name};
  const fs::path index = folder / index_name;
  if (!fs::exists(index, status)) {
    fail("checkpoint", "{}: has neither {} nor {}; convert .bin weights with transformers' save_pretrained first.",
         folder.string(), whole_name, index_name);
  }
  std::set<fs::path> files;
  for (const auto& [name, shard] : parse_index(read_text(index), index.string())) files.insert(folder / shard);
  return {files.begin(), files.end()};
}

void refuse_gguf(const fs::path& path) {
  std::error_code status;
  fs::path file = is_gguf(path) ? path : fs::path();
  if (fs::is_directory(path, status) && !fs::exists(path / "config.json", status)) {
    for (const auto& entry : fs::directory_iterator(path, status)) {
      if (is_gguf(entry.path())) file = entry.path();
    }
  }
  if (file.empty()) return;
  fail("checkpoint", "{}: is a GGUF file; convert it first: tapetune import {} --out DIR.", file.string(),
       file.string());
}

CheckpointFolder CheckpointFolder::open(const fs::path& folder) {
  std::error_code status;
  if (!fs::exists(folder, status)) {
    fail("checkpoint",
         "{}: no such folder; give the folder of a Hugging Face checkpoint (config.json, model.safetensors).",
         folder.string());
  }
  refuse_gguf(folder);
  if (!fs::is_directory(folder, status)) {
    fail("checkpoint", "{}: is a file; give the folder that holds config.json and the weights.", folder.string());
  }
  const fs::path config_path = folder / "config.json";
  if (!fs::exists(config_path, status)) {
    fail("checkpoint", "{}: no such file; a Hugging Face checkpoint has a config.json beside its weights.",
         config_path.string());
  }
  CheckpointFolder result;
  result.path = folder;
  result.config = parse_config(read_text(config_path), config_path.string());

  const std::vector<fs::path> files = weight_files(folder);
  for (const fs::path& file : files) {
    std::error_code absent;
    if (!fs::exists(file, absent)) {
      fail("checkpoint", "{}: no such file, but {} names it; download or copy this shard.", file.string(), index_name);
    }
    map_safetensors(file, result.tensors);
  }
  result.shards = files.size();
  if (files.front().filename() == whole_name) return result;
  const fs::path index = folder / index_name;
  for (const auto& [name, shard] : parse_index(read_text(index), index.string())) {
    const auto found = result.tensors.find(name);
    if (found == result.tensors.end() || found->second.file->path().filename() != shard) {
      fail("checkpoint",
           "{}: tensor {} should be in {}, but is not; index and shards are of different checkpoints, copy both again.",
           index.string(), name, shard);
    }
  }
  return result;
}

}  // namespace tapetune
