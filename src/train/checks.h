// What training refuses to go on with: ranks that differ, and numbers that are NaN or Inf.
#pragma once

#include <string>
#include <vector>

#include "adapters/build_model.h"
#include "core/json.h"
#include "distributed/world.h"
#include "recipe/recipe.h"
#include "run/base.h"

namespace tapetune {

// Fails where ranks differ in what they must agree on. Weights are compared by the first bytes of each tensor, data by
// its size and by Batches::sample_hash.
void require_same_run(World& world, const Recipe& recipe, const BaseModel& base, const Json& data,
                      const std::string& data_sample, const std::string& version);

// The base model's first tensor with NaN or Inf; empty: none. Weights that are sharded are read from their files.
std::string bad_base_weight(const BaseModel& base);
// The first trained parameter with NaN or Inf, and the first whose gradient has.
std::string bad_parameter(const std::vector<Parameter>& parameters);
std::string bad_gradient(const std::vector<Parameter>& parameters);

// Training cannot go on at this step; names the weight, parameter or gradient that is NaN or Inf, or says `otherwise`,
// and the last checkpoint without.
struct TrainSetup;
[[noreturn]] void fail_not_finite(const TrainSetup& setup, std::int64_t step, const std::string& otherwise);
// What a step made, before it is saved: a gradient that is finite may still make parameters that are not. All ranks
// agree, so that none waits for another.
void require_finite(const TrainSetup& setup, std::int64_t step);

}  // namespace tapetune
