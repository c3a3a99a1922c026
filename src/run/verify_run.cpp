#include "run/verify_run.h"

#include <functional>
#include <optional>
#include <sstream>

#include "adapters/checkpoints.h"
#include "checkpoint/finite.h"
#include "core/digits.h"
#include "core/error.h"
#include "core/file.h"
#include "core/signals.h"
#include "run/base.h"
#include "run/checkpoint_files.h"
#include "run/inputs.h"
#include "run/run_data.h"
#include "run/run_folder.h"

namespace tapetune {

namespace fs = std::filesystem;

namespace {

using State = RunCheck::State;

// The first tensor of a file with NaN or Inf; empty: none.
std::string first_bad_tensor(const fs::path& file) {
  StoredTensors stored;
  map_safetensors(file, stored);
  for (const auto& [name, tensor] : stored) {
    check_interrupted();
    if (!all_finite(tensor_from(tensor))) return name;
  }
  return "";
}

class RunVerification {
 public:
  explicit RunVerification(const fs::path& run) : run_(run) {}

  std::vector<RunCheck> verify() {
    check("recipe.yaml", [&] {
      written_ = RunFolder::recipe_in(run_);
      return RunCheck{State::ok, "", "readable"};
    });
    if (written_) found_ = with_found_paths(*written_, run_, /*say=*/false);
    check_checkpoints();
    check("adapter", [&] { return adapter(); });
    check("metrics.jsonl", [&] { return metrics(); });
    for (const char* name : {"inputs.json", "machines.json"}) {
      check(name, [&] { return json_file(name); });
    }
    check("model", [&] { return model(); });
    check("data", [&] { return data(); });
    return checks_;
  }

 private:
  // What work() fails with is the damage.
  void check(const std::string& part, const std::function<RunCheck()>& work) {
    check_interrupted();
    RunCheck result;
    try {
      result = work();
    } catch (const Interrupted&) {
      throw;
    } catch (const std::exception& error) {  // ours, the file system's, and that of JSON of another shape
      result = {State::damaged, "", words_of(error)};
    }
    result.part = part;
    checks_.push_back(std::move(result));
  }

  void check_checkpoints() {
    const std::vector<RunFolder::Saved> all = RunFolder::all_in(run_);
    for (const RunFolder::Saved& saved : all) {
      check("checkpoints/" + saved.folder.filename().string(), [&] {
        if (const std::string damage = damage_of(saved.folder); !damage.empty()) {
          return RunCheck{State::damaged, "", damage};
        }
        for (const char* file : {"adapter_model.safetensors", "optimizer.safetensors"}) {
          const std::string bad = first_bad_tensor(saved.folder / file);
          if (!bad.empty()) return RunCheck{State::damaged, "", fmt::format("{} of {} has NaN or Inf", bad, file)};
        }
        newest_ = saved;
        state_ = parse_json(read_text(saved.folder / "state.json"), "verify", "state.json");
        return RunCheck{State::ok, "",
                        has_hashes(saved.folder) ? "all files have the BLAKE3 hashes that were recorded"
                                                 : "readable; saved by an earlier version, which recorded no hashes"};
      });
    }
    if (all.empty()) checks_.push_back({State::unchecked, "checkpoints", "there is none yet"});
  }

  RunCheck adapter() const {
    const fs::path folder = run_ / "adapter";
    std::error_code status;
    const bool done = newest_ && written_ && newest_->step == written_->steps;
    if (!fs::exists(folder, status)) {
      return {State::unchecked, "",
              done ? "not written yet; rerun tapetune train RUN to write it" : "the training is not finished"};
    }
    const std::string bad = first_bad_tensor(folder / "adapter_model.safetensors");
    if (!bad.empty()) return {State::damaged, "", bad + " has NaN or Inf"};
    const char* const files[] = {"adapter_model.safetensors", "adapter_config.json", "tapetune.json"};
    for (const char* name : files) {
      if (fs::path(name).extension() != ".json") continue;
      parse_json(read_text(folder / name), "verify", (folder / name).string());
    }
    if (!done) return {State::unchecked, "", "readable; no undamaged checkpoint of its step to compare with"};
    for (const char* name : files) {
      if (hash_of_file(folder / name) != hash_of_file(newest_->folder / name)) {
        return {State::damaged, "",
                fmt::format("{} differs from that of {}; rerun tapetune train RUN to write it again", name,
                            newest_->folder.filename().string())};
      }
    }
    return {State::ok, "", fmt::format("the same files as {}", newest_->folder.filename().string())};
  }

  RunCheck metrics() const {
    const fs::path file = run_ / "metrics.jsonl";
    std::error_code status;
    const auto counted_on = newest_ ? state_.value("metrics_bytes", std::int64_t{0}) : std::int64_t{0};
    if (!fs::exists(file, status) && counted_on == 0) return {State::unchecked, "", "there are none yet"};
    const std::string text = read_text(file);
    if (static_cast<std::int64_t>(text.size()) < counted_on) {
      return {
          State::damaged, "",
          fmt::format("has {} bytes, but the run had written {} at step {}", text.size(), counted_on, newest_->step)};
    }
    // What follows the last checkpoint may be cut off, and is written again.
    std::istringstream lines(newest_ ? text.substr(0, static_cast<std::size_t>(counted_on)) : "");
    std::int64_t number = 0, before = 0;
    for (std::string line; std::getline(lines, line);) {
      ++number;
      const Json json = parse_json(line, "verify", fmt::format("line {}", number));
      const auto step = json.is_object() ? json.find("step") : json.end();
      if (step == json.end() || !step->is_number_integer() || step->get<std::int64_t>() < before) {
        return {State::damaged, "", fmt::format("line {} has no step, or one before that of the line above", number)};
      }
      before = step->get<std::int64_t>();
    }
    return {State::ok, "", fmt::format("{}, up to step {}", counted(number, "line"), before)};
  }

  RunCheck json_file(const char* name) const {
    std::error_code status;
    if (!fs::exists(run_ / name, status)) return {State::unchecked, "", "not there; an earlier version wrote none"};
    parse_json(read_text(run_ / name), "verify", name);
    return {State::ok, "", "readable"};
  }

  RunCheck model() const {
    if (!written_) return {State::unchecked, "", "recipe.yaml cannot be read"};
    if (found_->init) return {State::ok, "", "random weights, which the recipe draws"};
    const std::string hash = hash_weights(open_checkpoint(found_->model));
    if (written_->model_hash.empty()) return {State::unchecked, "", "the run recorded no hash"};
    if (hash == written_->model_hash) return {State::ok, "", fmt::format("{} has the recorded hash", found_->model)};
    return {State::damaged, "",
            fmt::format("{}: the weights changed since the training: they are {}, it was trained on {}", found_->model,
                        hash, written_->model_hash)};
  }

  RunCheck data() const {
    if (!written_) return {State::unchecked, "", "recipe.yaml cannot be read"};
    const std::string names = token_names(*found_);
    std::error_code status;
    for (std::size_t i = 0; i < found_->data.size(); ++i) {
      const fs::path file = token_path(*found_, i);
      if (!fs::exists(file, status)) return {State::unchecked, "", fmt::format("{}: not found", file.string())};
    }
    BaseModel base;
    base.config = found_->init ? random_model_config(*found_) : CheckpointFolder::open(found_->model).config;
    base.tokenizer = found_->init ? fs::path(found_->init->tokenizer) : fs::path(found_->model);
    Batches batches = open_batches(*found_, base);
    if (!newest_) return {State::unchecked, "", "there is no checkpoint to compare with"};
    batches.restore(state_.value("data", Json()));
    const std::string sample = state_.value("data_sample", std::string());
    if (sample.empty()) return {State::unchecked, "", names + ": as large as recorded; no sample was"};
    if (sample == batches.sample_hash())
      return {State::ok, "", names + ": a sample of the tokens has the recorded hash"};
    return {State::damaged, "", names + ": the tokens changed since the training"};
  }

  fs::path run_;
  std::optional<Recipe> written_, found_;
  std::optional<RunFolder::Saved> newest_;  // that is undamaged
  Json state_;                              // of it
  std::vector<RunCheck> checks_;
};

}  // namespace

std::vector<RunCheck> verify_run(const fs::path& run) { return RunVerification(run).verify(); }

std::string_view check_state_name(State state) {
  return state == State::ok ? "ok" : state == State::damaged ? "damaged" : "unchecked";
}

Json run_checks_json(const std::vector<RunCheck>& checks) {
  Json list = Json::array();
  for (const RunCheck& check : checks) {
    list.push_back({{"part", check.part}, {"state", check_state_name(check.state)}, {"detail", check.detail}});
  }
  return list;
}

}  // namespace tapetune
