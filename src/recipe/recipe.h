// A training run as one YAML file: its schema, reading it with all that is wrong at once, and writing it back.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "adapters/method.h"
#include "model/training.h"

namespace tapetune {

// A model without weights yet.
struct RandomModel {
  std::int64_t hidden = 0, layers = 0, heads = 0, kv_heads = 0, head_dim = 0, ffn = 0, vocab = 0;
  double norm_eps = 1e-5;
  bool tied = false;
  std::string tokenizer;  // folder to take tokenizer.json from; empty: none
};

struct DataSource {
  std::string path;
  double weight = 1.0;  // windows are drawn in proportion to weights; 1 for a single file
};

struct Recipe {
  std::string model;                // folder of a checkpoint; empty where `init` is set
  std::string model_hash;           // Checkpoint::hash of it; empty: not known yet
  std::optional<RandomModel> init;  // training from scratch
  std::vector<DataSource> data;
  std::string run;
  std::int64_t context = 0;
  MethodOptions method;   // method, adapter, positions, attention, train_also and untie, complete
  bool version1 = false;  // the file has the form in which the first version wrote its runs
  std::string init_from;  // adapter folder to start from; empty: the method's own start
  std::int64_t steps = 0;
  std::int64_t batch = 1;
  std::int64_t micro_batch = 1;
  struct Optimizer {
    double lr = 2e-5, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.0;
    double clip = 1.0;  // 0: none
  } optimizer;
  struct Schedule {
    std::string kind = "constant";  // or cosine, linear
    std::int64_t warmup = 0;
    double min_lr = 0.0;
  } schedule;
  std::string dtype = "auto";  // or f32, bf16
  Checkpointing checkpointing = Checkpointing::full;
  std::string shard = "none";          // or base: a rank holds its part of what is frozen and of AdamW's state
  std::int64_t sequence_parallel = 1;  // ranks that share a sequence
  std::int64_t save_every = 100;       // 0: at the end only
  std::int64_t keep = 2;
  double held_out = 0.0;          // share of the data
  std::int64_t eval_every = 0;    // 0: never
  std::int64_t eval_windows = 0;  // 0: all that are held out
  std::int64_t log_every = 1;
  std::uint64_t seed = 0;
};

// A line of the schema, for people.
struct RecipeKey {
  std::string name;      // optimizer.lr
  std::string type;      // number
  std::string fallback;  // what holds where the key is absent; empty: it must be given
  std::string rule;      // above 0
  std::string help;
  bool affects_result;  // the trained numbers depend on it; the others may change when a run is resumed
};

// Every key, in the order in which a recipe is written.
std::span<const RecipeKey> recipe_keys();

// `text` with "key=value" overrides (optimizer.lr=1e-4, data=[a.tokens, b.tokens], positions.factor=null for what
// holds without it). Fails with everything that is wrong, a line each: [recipe] WHERE:LINE: …
Recipe parse_recipe(const std::string& text, std::string_view where, std::span<const std::string> overrides = {});

// The same of a file.
Recipe read_recipe(const std::filesystem::path& file, std::span<const std::string> overrides = {});

// All keys with what holds for them, in the schema's order; parse_recipe reads it back. `comments` open it, a line
// each.
std::string recipe_yaml(const Recipe& recipe, std::span<const std::string> comments = {});

struct RecipeDifference {
  std::string key, before, after;
  bool affects_result;  // as in RecipeKey
};

std::vector<RecipeDifference> differences(const Recipe& before, const Recipe& after);

// What a recipe that trains from scratch trains, before its method changes the rotary settings.
ModelConfig random_model_config(const Recipe& recipe);

}  // namespace tapetune
