#include "train/setup.h"

#include <unistd.h>

#include <ATen/Parallel.h>

#include "adapters/peft.h"
#include "core/digits.h"
#include "core/error.h"
#include "core/machine.h"
#include "distributed/sharded_base.h"
#include "distributed/ulysses.h"
#include "run/disk.h"
#include "run/inputs.h"
#include "run/run_data.h"
#include "train/checks.h"

namespace tapetune {

namespace {

namespace fs = std::filesystem;

std::string host_name() {
  char name[256] = "";
  return ::gethostname(name, sizeof name - 1) == 0 ? name : "unknown host";
}

AdaptedModel model_at_start(const Recipe& recipe, const std::string& init_from, const BaseModel& base,
                            at::Device device) {
  AdaptedModel adapted = adapt(base.config, base.weights, recipe.method, base.dtype, recipe.seed, device);
  if (!init_from.empty()) restore_parameters(adapted, base.weights, init_from);
  return adapted;
}

}  // namespace

TrainSetup open_setup(const Recipe& recipe, const std::string& version, World& world) {
  Recipe found = with_found_paths(recipe, recipe.run, world.is_rank0());
  Recipe hashed = with_hash(recipe, found.model, world);
  BaseModel base = open_base(found, recipe.shard == "base" ? at::kCPU : world.device());
  prepare_text(hashed, found, base.tokenizer, world);
  Batches batches = open_batches(found, base);
  std::string data_sample = batches.sample_hash();
  AdaptedModel adapted = model_at_start(hashed, found.init_from, base, world.device());
  require_same_run(world, hashed, base, batches.state(), data_sample, version);
  ProcessMesh mesh = make_process_mesh(world, hashed);
  const Recipe::Optimizer& adamw = recipe.optimizer;
  AdamW optimizer(adapted.parameters, {adamw.beta1, adamw.beta2, adamw.eps, adamw.weight_decay}, mesh.base);
  DataParallel gradients(adapted.parameters, mesh.gradients);
  if (adapted.parameters.empty()) {
    fail("train", "method {} has no trainable parameters; choose another.", recipe.method.name());
  }
  return {world,
          std::move(hashed),
          std::move(found),
          std::move(base),
          std::move(batches),
          std::move(data_sample),
          std::move(adapted),
          std::move(mesh),
          std::move(optimizer),
          std::move(gradients),
          std::nullopt,
          std::nullopt};
}

void begin_run(TrainSetup& setup, const std::string& version) {
  const Recipe& recipe = setup.recipe;
  World& world = setup.world;
  if (world.is_rank0()) {
    const fs::path& folder = setup.run.emplace(recipe, version).path();
    write_inputs(folder, recipe);
    setup.log.emplace(folder / "train.log");
    setup.say(fmt::format("tapetune {} on {} ({}): {}, {}, {}", version, host_name(), machine_name(),
                          counted(at::get_num_threads(), "thread"), counted(world.size(), "rank"),
                          world.device().str()));
    warn_of_small_disk(run_disk(setup.adapted, recipe), recipe);
    note_windows_off(setup.base.config, recipe.method);
    if (!setup.run->latest()) {
      for (const std::string& each : setup.adapted.notes) note("{}", each);
      warn_beyond_scaling(setup.base.config, setup.adapted.model.config(), recipe.context);
    }
  }
  const BatchShare& share = setup.mesh.share;
  if (share.sequences < recipe.micro_batch) {
    note("micro_batch {} is lowered to {}: a batch of {} gives each {} {} sequence{}", recipe.micro_batch,
         share.micro_batch, recipe.batch, recipe.sequence_parallel > 1 ? "group of ranks" : "rank", share.sequences,
         share.sequences == 1 ? "" : "s");
  }
}

void parallelize(TrainSetup& setup) {
  LlamaWeights weights = setup.adapted.model.weights();
  Parallel parallel;
  ulysses(parallel, setup.mesh.sequence, setup.adapted.model.config());
  shard_base(weights, setup.mesh.base, parallel, setup.world.device());
  if (setup.mesh.base.size() > 1) setup.base.weights = {};
  setup.adapted.model.share(std::move(weights), std::move(parallel));
}

}  // namespace tapetune
