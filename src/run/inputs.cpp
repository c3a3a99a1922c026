#include "run/inputs.h"

#include <sys/stat.h>

#include <optional>

#include "adapters/checkpoints.h"
#include "core/error.h"
#include "core/file.h"
#include "core/json.h"
#include "core/log.h"
#include "core/moment.h"
#include "core/progress.h"
#include "core/signals.h"
#include "data/text_files.h"
#include "run/run_folder.h"

namespace tapetune {

namespace {

namespace fs = std::filesystem;

constexpr const char* inputs_file = "inputs.json";

fs::path normal_path(const fs::path& path) { return fs::absolute(path).lexically_normal(); }

// None where there is no such file, or it is damaged: it saves work, nothing depends on it.
Json read_inputs(const fs::path& run) {
  std::error_code status;
  const fs::path file = run / inputs_file;
  if (!fs::exists(file, status)) return Json::object();
  try {
    Json json = parse_json(read_text(file), "run", file.string());
    return json.is_object() ? json : Json::object();
  } catch (const Error& error) {
    warn("{} It is ignored.", error.what());
    return Json::object();
  }
}

std::string text_at(const Json& json, const std::string& key) {
  const auto found = json.find(key);
  return found != json.end() && found->is_string() ? found->get<std::string>() : "";
}

fs::path find_recorded(const std::string& written, const fs::path& run, const Json& inputs) {
  if (written.empty() || input_exists(written)) return written;
  if (const fs::path inside = run / written; input_exists(inside.string())) return inside;  // run / "/x" is "/x"
  const auto paths = inputs.find("paths");
  const fs::path absolute = paths != inputs.end() && paths->is_object() ? text_at(*paths, written) : "";
  if (absolute.empty()) return written;
  if (const fs::path before = text_at(inputs, "run"); !before.empty()) {
    const fs::path moved = normal_path(run / absolute.lexically_relative(before));
    if (input_exists(moved.string())) return moved;
  }
  return input_exists(absolute.string()) ? absolute : fs::path(written);
}

// Every path of a recipe, to be read or replaced.
std::vector<std::string*> paths_of(Recipe& recipe) {
  std::vector<std::string*> paths{&recipe.model, &recipe.init_from};
  if (recipe.init) paths.push_back(&recipe.init->tokenizer);
  for (DataSource& source : recipe.data) paths.push_back(&source.path);
  return paths;
}

Json stamp_of(const fs::path& file) {
  struct stat info{};
  if (::stat(file.c_str(), &info) != 0) return Json();
  return {{"file", file.filename().string()},
          {"bytes", info.st_size},
          {"mtime_ns", std::int64_t{info.st_mtim.tv_sec} * 1'000'000'000 + info.st_mtim.tv_nsec}};
}

Json stamps_of(const fs::path& model) {
  Json stamps = Json::array();
  for (const fs::path& file : weight_files(model)) stamps.push_back(stamp_of(file));
  return stamps;
}

}  // namespace

fs::path find_path(const std::string& written, const fs::path& run) {
  return find_recorded(written, run, read_inputs(run));
}

Recipe with_found_paths(Recipe recipe, const fs::path& run, bool say) {
  const Json inputs = read_inputs(run);
  for (std::string* path : paths_of(recipe)) {
    const std::string found = find_recorded(*path, run, inputs).string();
    if (found != *path && say) note("{}: {} not found; using {}", run.string(), *path, found);
    *path = found;
  }
  return recipe;
}

Recipe read_run_recipe(const fs::path& run, bool say) { return with_found_paths(RunFolder::recipe_in(run), run, say); }

void write_inputs(const fs::path& run, const Recipe& recipe) {
  const Json before = read_inputs(run);
  Json inputs{{"run", normal_path(run).string()}, {"paths", Json::object()}};
  Recipe written = recipe;
  for (const std::string* path : paths_of(written)) {
    if (!path->empty()) inputs["paths"][*path] = normal_path(find_recorded(*path, run, before)).string();
  }
  if (!recipe.init) {
    inputs["model_hash"] = recipe.model_hash;
    inputs["weights"] = stamps_of(find_recorded(recipe.model, run, before));
  }
  WholeFile out(run / inputs_file, true);
  out.write(to_text(inputs, 2) + "\n");
  out.commit();
}

std::string hash_weights(const Checkpoint& base) {
  Progress progress("hashing the model", base.bytes(), "B");
  constexpr std::uint64_t felt = 1'000'000'000;  // bytes that take a second or more
  if (base.bytes() > felt) progress.begin("");
  return base.hash([&](std::uint64_t bytes) {
    at_moment("hash");
    check_interrupted();
    progress.advance(bytes);
  });
}

Recipe with_hash(Recipe recipe, const std::string& model, World& world) {
  if (recipe.init) return recipe;
  // The other ranks wait for the hash; they stop together before the first step.
  std::optional<HoldInterrupts> together;
  if (world.size() > 1) together.emplace();
  const std::string hash = world.broadcast(world.is_rank0() ? hash_weights(open_checkpoint(model)) : "");
  if (!recipe.model_hash.empty() && recipe.model_hash != hash) {
    std::error_code status;
    if (fs::exists(fs::path(recipe.run) / "recipe.yaml", status)) {
      fail("train",
           "{}: the weights changed since {} was trained: they hash to {}, it was trained on {}; restore the model, or "
           "train it in another run folder.",
           recipe.model, recipe.run, hash, recipe.model_hash);
    }
    fail("train",
         "{}: the weights hash to {}, but the recipe's model_hash is {}; use the right model, or remove model_hash.",
         recipe.model, hash, recipe.model_hash);
  }
  recipe.model_hash = hash;
  return recipe;
}

void require_trained_base(const fs::path& run, const Recipe& recipe, const Checkpoint& base, bool any_base) {
  if (recipe.model_hash.empty()) return;
  const Json inputs = read_inputs(run);
  if (text_at(inputs, "model_hash") == recipe.model_hash && inputs.contains("weights") &&
      inputs["weights"] == stamps_of(base.path())) {
    return;
  }
  const std::string hash = hash_weights(base);
  if (hash == recipe.model_hash) return;
  if (!any_base) {
    fail("run",
         "{}: the weights changed since {} was trained: they are {}, it was trained on {}; restore the model, or give "
         "--any-base to use this one.",
         base.path().string(), run.string(), hash, recipe.model_hash);
  }
  warn("{}: the weights changed since {} was trained: they are {}, it was trained on {}", base.path().string(),
       run.string(), hash, recipe.model_hash);
}

}  // namespace tapetune
