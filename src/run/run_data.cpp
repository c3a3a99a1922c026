#include "run/run_data.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "core/digits.h"
#include "core/error.h"
#include "core/file.h"
#include "core/json.h"
#include "core/log.h"
#include "data/pack.h"
#include "data/text_files.h"
#include "run/base.h"
#include "run/checkpoint_files.h"
#include "run/run_folder.h"

namespace tapetune {

namespace fs = std::filesystem;

namespace {

std::int64_t modified(const fs::path& path) { return fs::last_write_time(path).time_since_epoch().count(); }

// A file name as JSON keeps it, which is UTF-8: what is none is replaced.
std::string utf8_name(const std::string& name) { return from_text(to_text(Json(name))).get<std::string>(); }

// What a token file was packed from.
Json sources_of(const std::string& text) {
  Json files = Json::array();
  for (const TextFile& file : find_text_files(std::span(&text, 1))) {
    files.push_back({{"path", utf8_name(file.path.string())},
                     {"bytes", file.bytes},
                     {"modified", modified(file.path)},
                     {"blake3", hash_of_file(file.path)}});
  }
  return files;
}

// Which file is not what it was; empty: none. Only a file of the same size that was touched is read.
std::string changed_file(const Json& before, const std::string& text) {
  const std::vector<TextFile> files = find_text_files(std::span(&text, 1));
  if (files.size() != before.size()) return fmt::format("{} ({} files, not {})", text, files.size(), before.size());
  for (std::size_t i = 0; i < files.size(); ++i) {
    const Json& known = before[i];
    const fs::path& path = files[i].path;
    // The same text may be named otherwise from another working directory.
    const bool renamed =
        fs::path(known.at("path").get<std::string>()).filename() != utf8_name(path.filename().string());
    const bool same = !renamed && known.at("bytes") == files[i].bytes &&
                      (known.at("modified") == modified(path) || known.at("blake3") == hash_of_file(path));
    if (!same) return path.string();
  }
  return "";
}

// Beside the token file: what it was packed from.
fs::path record_of(const fs::path& tokens) { return tokens.string() + ".json"; }

// Where data number `index` is packed if it is text.
fs::path packed_path(const Recipe& recipe, std::size_t index) {
  const auto name = [&](std::size_t i) {
    fs::path own = fs::path(recipe.data[i].path).lexically_normal();
    if (!own.has_filename()) own = own.parent_path();  // books/
    std::string text = own.filename().string();
    std::replace_if(text.begin(), text.end(), [](char c) { return c == '*' || c == '?' || c == '['; }, '_');
    return text;
  };
  std::string own = name(index);
  for (std::size_t i = 0; i < index; ++i) {
    if (name(i) == own) {
      own = fmt::format("{}-{}", index + 1, own);
      break;
    }
  }
  return fs::path(recipe.run) / "data" / (own + ".tokens");
}

// Fails where packing would replace a token file that no run packed. A run that was killed has left its lock.
void require_own_tokens(const Recipe& recipe, const fs::path& tokens) {
  std::error_code status;
  if (!fs::exists(tokens, status) || fs::exists(record_of(tokens), status)) return;
  if (fs::exists(fs::path(recipe.run) / "lock", status)) return;
  fail("train", "{}: is there already, and no run packed it; move it, or choose another run folder.", tokens.string());
}

// Whether the token file is what this text gives with this tokenizer.
bool is_packed(const Recipe& recipe, const std::string& text, const fs::path& tokens, const fs::path& tokenizer) {
  std::error_code status;
  const fs::path record = record_of(tokens);
  if (!fs::exists(tokens, status) || !fs::exists(record, status)) return false;
  if (!input_exists(text)) {
    note("{}: not found; training on {}, which was packed from it", text, tokens.string());
    return true;
  }
  const bool begun = RunFolder::latest_in(recipe.run).has_value();
  const std::optional<Vocabulary> vocabulary = known_vocabulary(tokenizer);
  // A first attempt with another model may have failed after it packed the text.
  if (!begun && vocabulary && TokenFile::open(tokens).info().vocabulary_hash != vocabulary->hash) return false;
  const Json before = parse_json(read_text(record), "train", record.string());
  const std::string changed = changed_file(before.at("files"), text);
  if (changed.empty()) {
    note("training on {}, packed from {} before", tokens.string(), text);
    return true;
  }
  if (!begun) return false;
  fail("train", "{}: has changed since this run packed it; restore it, or choose another run folder.", changed);
}

}  // namespace

bool is_text_data(const Recipe& recipe, std::size_t index) {
  const std::string& path = recipe.data.at(index).path;
  std::error_code status;
  return is_text_input(path) ||
         (!fs::exists(path, status) && fs::exists(record_of(packed_path(recipe, index)), status));
}

fs::path token_path(const Recipe& recipe, std::size_t index) {
  return is_text_data(recipe, index) ? packed_path(recipe, index) : fs::path(recipe.data.at(index).path);
}

void pack_text(const Recipe& recipe, const fs::path& tokenizer) {
  for (std::size_t i = 0; i < recipe.data.size(); ++i) {
    const std::string& text = recipe.data[i].path;
    if (!is_text_data(recipe, i)) continue;
    const fs::path tokens = token_path(recipe, i);
    if (is_packed(recipe, text, tokens, tokenizer)) continue;
    if (tokenizer.empty()) {
      fail("train", "{}: is text, but the recipe names no tokenizer to pack it with; set model.tokenizer.", text);
    }
    PackOptions options;
    options.inputs = {text};
    options.model = tokenizer;
    options.out = tokens;
    options.replace = true;
    options.threads = at::get_num_threads();
    const Json files = sources_of(text);
    std::error_code status;
    require_own_tokens(recipe, tokens);
    const bool made = !fs::exists(recipe.run, status), claimed = RunFolder::claim(recipe.run);
    fs::create_directories(tokens.parent_path(), status);
    if (status) fail("train", "{}: cannot be created: {}; choose another run folder.", recipe.run, status.message());
    try {
      const Packed packed = pack(options);
      WholeFile out(record_of(tokens), true);
      out.write(to_text(Json{{"text", utf8_name(text)}, {"files", files}}, 2) + "\n");
      out.commit();
      note("packed {} into {}: {}", text, tokens.string(), counted(packed.info.tokens, "token"));
    } catch (...) {
      fs::remove(tokens.parent_path(), status);  // a folder goes only if there is nothing in it
      if (claimed) fs::remove(fs::path(recipe.run) / "lock", status);
      if (made) fs::remove(recipe.run, status);
      throw;
    }
  }
}

void prepare_text(const Recipe& written, const Recipe& recipe, const fs::path& tokenizer, World& world) {
  std::vector<fs::path> packed;
  for (std::size_t i = 0; i < recipe.data.size(); ++i) {
    if (is_text_data(recipe, i)) packed.push_back(token_path(recipe, i));
  }
  if (packed.empty()) return;
  if (world.is_rank0()) {
    RunFolder::require_fits(written);
    pack_text(recipe, tokenizer);
  }
  world.broadcast("packed");
  for (const fs::path& tokens : packed) {
    std::error_code status;
    if (fs::exists(tokens, status)) continue;
    fail("train", "{}: not found on this machine; pack the text with tapetune data pack and copy it everywhere.",
         tokens.string());
  }
}

std::string token_names(const Recipe& recipe) {
  std::vector<std::string> names;
  names.reserve(recipe.data.size());
  for (std::size_t i = 0; i < recipe.data.size(); ++i) names.push_back(token_path(recipe, i).string());
  return fmt::format("{}", fmt::join(names, ", "));
}

Batches open_batches(const Recipe& recipe, const BaseModel& base) {
  const std::optional<Vocabulary> vocabulary = known_vocabulary(base.tokenizer);
  std::vector<DataFile> files;
  files.reserve(recipe.data.size());
  for (std::size_t i = 0; i < recipe.data.size(); ++i) {
    files.push_back({open_tokens(token_path(recipe, i), vocabulary, base.config),
                     recipe.data.size() > 1 ? std::optional(recipe.data[i].weight) : std::nullopt});
  }
  BatchSettings settings;
  settings.context = recipe.context;
  settings.seed = recipe.seed;
  settings.held_out = recipe.held_out;
  return {std::move(files), settings};
}

void share_packed(const Recipe& from, const Recipe& to) {
  RunFolder::require_fits(to);
  for (std::size_t i = 0; i < from.data.size(); ++i) {
    if (!is_text_data(from, i)) continue;
    const fs::path source = packed_path(from, i), target = packed_path(to, i);
    std::error_code status;
    if (fs::exists(record_of(target), status)) continue;
    require_own_tokens(to, target);
    RunFolder::claim(to.run);
    fs::create_directories(target.parent_path(), status);
    fs::remove(target, status);  // of packing that was killed
    // The record last: without it, a token file counts as not packed.
    for (const auto& [file, link] : {std::pair(source, target), std::pair(record_of(source), record_of(target))}) {
      fs::create_hard_link(file, link, status);
      if (status) fs::copy_file(file, link, status);
      if (status)
        fail("train", "{}: cannot be written: {}; choose another run folder.", link.string(), status.message());
    }
  }
}

std::optional<TrainingData> find_training_data(const Recipe& recipe, const std::string& path) {
  const auto same = [&](const fs::path& other) {
    std::error_code absent;
    return other == path || fs::equivalent(other, path, absent);
  };
  for (std::size_t i = 0; i < recipe.data.size(); ++i) {
    if (same(recipe.data[i].path) || same(token_path(recipe, i))) return TrainingData{i, true};
  }
  for (std::size_t i = 0; i < recipe.data.size(); ++i) {
    if (!is_text_data(recipe, i) || !input_exists(recipe.data[i].path)) continue;
    try {
      const std::vector<TextFile> files = find_text_files(std::span(&recipe.data[i].path, 1));
      if (std::any_of(files.begin(), files.end(), [&](const TextFile& file) { return same(file.path); })) {
        return TrainingData{i, false};
      }
    } catch (const Error&) {  // files that cannot be read any more are none of today's
    }
  }
  return std::nullopt;
}

}  // namespace tapetune
