// What a run trains with, and the order in which all ranks open it.
#pragma once

#include <optional>
#include <string>

#include "adapters/build_model.h"
#include "core/log.h"
#include "data/batches.h"
#include "distributed/data_parallel.h"
#include "distributed/mesh.h"
#include "distributed/world.h"
#include "recipe/recipe.h"
#include "run/base.h"
#include "run/run_folder.h"
#include "train/adamw.h"

namespace tapetune {

struct TrainSetup {
  World& world;
  Recipe recipe;  // as written, which is what the run folder keeps
  Recipe found;   // with its paths as they are found
  BaseModel base;
  Batches batches;
  std::string data_sample;
  AdaptedModel adapted;
  ProcessMesh mesh;
  AdamW optimizer;
  DataParallel gradients;
  std::optional<RunFolder> run;  // rank 0's
  std::optional<LogFile> log;    // train.log, rank 0's

  // A line for train.log.
  void say(const std::string& text) {
    if (log) log->line(text);
  }
};

// Opens model and data, packs text and builds the model; fails where the ranks differ. All ranks call it.
TrainSetup open_setup(const Recipe& recipe, const std::string& version, World& world);

// Takes the run folder and says what trains and what the user should know.
void begin_run(TrainSetup& setup, const std::string& version);

// Frozen weights are sharded, and sequences shared, as the recipe says. After the parameters have their values, because
// nobody needs the base whole any more.
void parallelize(TrainSetup& setup);

}  // namespace tapetune
