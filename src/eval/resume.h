// Evaluations that take long: they run to the end with progress, and save partial results in a file to resume from.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "core/json.h"
#include "core/progress.h"
#include "core/signals.h"
#include "distributed/rendezvous.h"
#include "distributed/world.h"
#include "model/llama.h"

namespace tapetune {

// What `eval KIND` of the model `who` saved there, or null where there is no such file yet. Fails where it is anything
// else.
Json read_resume_file(const std::filesystem::path& path, std::string_view kind, std::string_view who);
void write_resume_file(const std::filesystem::path& path, std::string_view kind, std::string_view who,
                       const Json& state);

[[noreturn]] void fail_damaged();

// A value of a saved state; fails where it is missing or of another type.
template <typename Value>
Value resume_value(const Json& object, const char* key) {
  const auto found = object.is_object() ? object.find(key) : object.end();
  if (!object.is_object() || found == object.end()) fail_damaged();
  try {
    return found->get<Value>();
  } catch (const nlohmann::json::exception&) {
    fail_damaged();
  }
}

// A model is known by what it computes: its weights may have changed under their name.
constexpr double same_model = 1e-5;  // relative; another number of threads moves the last digits of a loss
// The loss of these tokens.
double fingerprint(const Llama& model, const std::vector<std::int64_t>& tokens);
// Throws NotFinite where it is NaN or Inf.
void require_finite_fingerprint(double fingerprint);
void check_fingerprint(double before, double now);

// Where an evaluation saves its state, and who shares its work.
struct ResumeFile {
  std::filesystem::path file = {};  // with what is done; empty: nothing is saved
  std::string who = {};             // the model's name, which must be the same to resume
  World* world = nullptr;           // the ranks that share the work; null: this process alone
};

// Resumes from what an earlier run saved, if there is something. Rank 0 reads it for all.
template <typename Run>
void resume(Run& run, const ResumeFile& resume_file) {
  if (resume_file.file.empty()) return;
  const bool reads = resume_file.world == nullptr || resume_file.world->is_rank0();
  Json saved = reads ? read_resume_file(resume_file.file, Run::kind, resume_file.who) : Json();
  if (resume_file.world != nullptr) saved = json_of_rank(0, resume_file.world->broadcast(to_text(saved)));
  if (!saved.is_null()) run.restore(saved);
}

// Fails on all ranks where one was asked for something else, or has another model: `settings` must be the same, and
// what the model computes (see fingerprint) nearly so.
void require_same_work(World& world, const Json& settings, double fingerprint);
// What every rank has found, in the order of ranks; all of them know it then. Fails with Interrupted on all of them
// where one was.
std::vector<Json> share_found(World& world, const Json& found);

[[noreturn]] void fail_unfit(std::size_t rank);

// Enters what a rank has found.
template <typename Run>
void take_from(Run& run, std::size_t rank, const Json& found) {
  if (found.is_null()) return;
  try {
    run.take(found.get<typename Run::Found>());
  } catch (const std::exception&) {
    fail_unfit(rank);
  }
}

// To the end, with progress; saved now and then, when interrupted, and at the end. Run has
//   kind, unit      what it is called, and what it counts
//   Found           what the model makes of a piece of work, with to_json and from_json for the other ranks
//   score(ahead)    that of the next piece, or of one so many behind it; none: there is none
//   take(found)     enters it, piece by piece in their order: so the results do not depend on the number of ranks;
//                   throws where it does not fit, as another rank's may
//   settings(), fingerprint()   what it depends on: the same on all ranks
//   done(), total(), state(), restore(state), results()
template <typename Run>
auto finish(Run& run, const ResumeFile& resume_file = {}) {
  using Clock = std::chrono::steady_clock;
  constexpr auto interval = std::chrono::seconds(30);
  World* const world = resume_file.world != nullptr && resume_file.world->size() > 1 ? resume_file.world : nullptr;
  // A rank that left while another computes would leave that one waiting.
  std::optional<HoldInterrupts> together;
  if (world != nullptr) {
    together.emplace();
    require_same_work(*world, run.settings(), run.fingerprint());
  }
  Clock::time_point saved = Clock::now();
  const auto save = [&] {
    const bool writes = world == nullptr || world->is_rank0();
    if (writes && !resume_file.file.empty())
      write_resume_file(resume_file.file, Run::kind, resume_file.who, run.state());
    saved = Clock::now();
  };
  Progress progress(std::string(Run::kind), static_cast<std::uint64_t>(run.total()), std::string(Run::unit),
                    static_cast<std::uint64_t>(run.done()));
  try {
    while (run.done() < run.total()) {
      const std::int64_t before = run.done();
      if (world == nullptr) {
        run.take(run.score(0));
      } else {
        world->begin_step(before);
        const std::optional<typename Run::Found> own = run.score(world->rank());
        const std::vector<Json> all = share_found(*world, own ? Json(*own) : Json());
        for (std::size_t r = 0; r < all.size(); ++r) take_from(run, r, all[r]);
      }
      progress.advance(static_cast<std::uint64_t>(run.done() - before));
      check_interrupted();
      if (Clock::now() - saved >= interval) save();
    }
  } catch (const Interrupted&) {
    if (resume_file.file.empty()) throw;
    save();
    throw Interrupted(fmt::format("interrupted; {} of {} {} are saved in {}: rerun the same command to resume",
                                  run.done(), run.total(), Run::unit, resume_file.file.string()));
  }
  save();
  return run.results();
}

}  // namespace tapetune
