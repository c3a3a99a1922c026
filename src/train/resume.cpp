#include "train/resume.h"

#include "adapters/component.h"
#include "adapters/peft.h"
#include "checkpoint/writer.h"
#include "core/error.h"
#include "core/file.h"
#include "core/log.h"
#include "core/moment.h"
#include "run/run_data.h"

namespace tapetune {

namespace {

// Random draws depend on the recipe's seed, the step, and the sequence's place in the batch, on nothing else.
// Checkpoints say so, because before this they depended on the micro-batch.
constexpr const char* draws_by_sequence = "sequence";

Json progress_json(const TrainSetup& setup, const TrainProgress& at) {
  return {{"step", at.step},
          {"loss", at.loss},
          {"evaluated", at.evaluated},
          {"draws", draws_by_sequence},
          {"metrics_bytes", at.metrics_bytes},
          {"events_bytes", at.events_bytes},
          {"data", setup.batches.state()},
          {"data_sample", setup.data_sample}};
}

void warn_of_other_draws(const TrainSetup& setup, const Json& saved, std::int64_t step) {
  const Components& components = setup.adapted.model.components();
  const bool draws = components.adapter->draws() || components.positions->draws();
  if (!draws || saved.value("draws", "") == draws_by_sequence) return;
  warn(
      "{}: an earlier version of tapetune began this run; from step {} on, dropout and random offsets are drawn "
      "for each sequence instead of each micro-batch.",
      setup.recipe.run, step + 1);
}

// Earlier versions kept no sample.
void require_same_tokens(const TrainSetup& setup, const Json& saved, std::int64_t step) {
  if (saved.value("data_sample", setup.data_sample) == setup.data_sample) return;
  fail("train",
       "{}: the tokens are not those that step {} was trained on: the files have the same size and other tokens; "
       "restore {}, or choose another run folder.",
       token_names(setup.found), step, setup.found.data.size() > 1 ? "them" : "it");
}

}  // namespace

TrainProgress resume(TrainSetup& setup) {
  TrainProgress at;
  const auto last = setup.run ? setup.run->latest_undamaged() : std::nullopt;
  const std::filesystem::path file = last ? last->folder / "state.json" : std::filesystem::path();
  const std::string text = setup.world.broadcast(last ? read_text(file) : "");
  if (text.empty()) return at;
  std::map<std::string, at::Tensor> state;
  if (last) {
    restore_parameters(setup.adapted, setup.base.weights, last->folder);
    StoredTensors stored;
    map_safetensors(last->folder / "optimizer.safetensors", stored);
    for (const auto& [name, tensor] : stored) state[name] = tensor_from(tensor);
  }
  for (const Parameter& p : setup.adapted.parameters) setup.mesh.gradients.broadcast(p.value.detach()).wait();
  setup.optimizer.restore(state, setup.mesh.gradients);
  const Json saved = parse_json(text, "train", file.string());
  at.step = saved.at("step").get<std::int64_t>();
  at.loss = saved.value("loss", 0.0);
  at.evaluated = saved.value("evaluated", at.step);
  warn_of_other_draws(setup, saved, at.step);
  at.metrics_bytes = saved.at("metrics_bytes").get<std::int64_t>();
  at.events_bytes = saved.value("events_bytes", std::int64_t{0});
  setup.batches.restore(saved.at("data"));
  require_same_tokens(setup, saved, at.step);
  return at;
}

void save_checkpoint(TrainSetup& setup, const TrainProgress& at) {
  const std::map<std::string, at::Tensor> optimizer = setup.optimizer.state();
  if (!setup.run) return;
  setup.run->save(at.step, setup.recipe.keep, [&](const std::filesystem::path& folder) {
    write_adapter_files(setup.adapted, folder, setup.base.path);
    at_moment("saving");
    save_safetensors(folder / "optimizer.safetensors", optimizer, false);
    at_moment("saving");
    OutputFile state(folder / "state.json");
    setup.batches.skip(at.step * setup.recipe.batch - setup.batches.position());
    state.write(to_text(progress_json(setup, at), 2) + "\n");
    state.finish();
    at_moment("saving");
  });
}

}  // namespace tapetune
