#include "report/compare.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <sstream>
#include <tuple>

#include "adapters/checkpoints.h"
#include "checkpoint/dtype.h"
#include "core/digits.h"
#include "core/error.h"
#include "core/escape.h"
#include "core/file.h"
#include "core/log.h"
#include "core/machine.h"
#include "core/memory.h"
#include "core/output.h"
#include "core/partial.h"
#include "core/signals.h"
#include "distributed/rendezvous.h"
#include "eval/passkey.h"
#include "hf/hash.h"
#include "hf/tokenizer.h"
#include "recipe/shipped.h"
#include "report/page.h"
#include "report/positions.h"
#include "run/open.h"
#include "run/inputs.h"
#include "run/record.h"
#include "run/run_data.h"
#include "run/run_folder.h"
#include "train/trainer.h"

namespace tapetune {

namespace {

namespace fs = std::filesystem;

constexpr std::string_view base_entry = "base model";
constexpr std::int64_t looked_at = 512, pictured = 28;  // tokens of a text, and of these in a matrix

template <typename... Args>
void say(fmt::format_string<Args...> text, Args&&... args) {
  if (!quiet()) write_error(printable(fmt::format(text, std::forward<Args>(args)...)) + "\n");
}

// --- what may be compared --------------------------------------------------------------------------------------------

// The keys that decide the order of the data and its split.
bool shared_key(std::string_view key) {
  return key == "data" || key == "context" || key == "batch" || key == "seed" || key == "held_out";
}

std::string base_of(const Recipe& recipe, std::map<std::string, std::string>& hashes, World& world) {
  if (recipe.init) return "";
  std::string& hash = hashes[recipe.model];
  if (hash.empty()) {
    hash = world.broadcast(world.is_rank0() ? hash_weights(open_checkpoint(recipe.model)) : "");
  }
  return hash;
}

// Base models are the same if their weights are, wherever their folders are.
void require_comparable(std::vector<NamedRecipe>& recipes, World& world) {
  std::map<std::string, std::string> hashes;
  for (NamedRecipe& each : recipes) {
    const std::string hash = base_of(each.recipe, hashes, world);
    if (!each.recipe.model_hash.empty() && each.recipe.model_hash != hash) {
      fail("compare",
           "{}: the weights in {} have the hash {}, but the recipe's model_hash is {}; give the right model with "
           "model=DIR.",
           each.name, each.recipe.model, hash, each.recipe.model_hash);
    }
    each.recipe.model_hash = hash;
  }
  const NamedRecipe& first = recipes.front();
  for (const NamedRecipe& other : recipes) {
    const auto named = [](const Recipe& r) { return r.init ? std::string("random weights") : r.model; };
    std::string keys;
    for (const RecipeDifference& d : differences(first.recipe, other.recipe)) {
      if (d.key == "model_hash" || d.key.starts_with("model.")) {
        fail("compare",
             "{} and {} start from different base models, {} and {} ({}: {} and {}), so their results are not "
             "comparable; give all of them the same model=DIR, or run a comparison for each base model.",
             first.name, other.name, named(first.recipe), named(other.recipe), d.key, d.before, d.after);
      }
      if (shared_key(d.key)) {
        keys += fmt::format("{}{} ({} and {})", keys.empty() ? "" : ", ", d.key, d.before, d.after);
      }
    }
    if (!keys.empty()) {
      fail("compare", "{} and {} differ in {}, so they would train on different data; set it for all with key=value.",
           first.name, other.name, keys);
    }
  }
}

void require_own_folders(const std::vector<NamedRecipe>& recipes) {
  std::map<std::string, std::string> owners;
  for (const NamedRecipe& each : recipes) {
    const auto [at, added] = owners.emplace(fs::absolute(each.recipe.run).lexically_normal().string(), each.name);
    if (!added) {
      fail("compare", "{} and {} have the same run folder, {}; give --runs DIR, which gets a folder for each recipe.",
           at->second, each.name, each.recipe.run);
    }
  }
}

std::vector<SettingRow> differing_settings(const std::vector<NamedRecipe>& recipes) {
  std::vector<SettingRow> rows;
  for (const RecipeKey& key : recipe_keys()) {
    if (!key.affects_result || key.name == "model" || key.name == "model_hash") continue;
    SettingRow row{key.name, std::vector<std::string>(recipes.size())};
    bool differs = false;
    for (std::size_t i = 1; i < recipes.size(); ++i) {
      for (const RecipeDifference& d : differences(recipes[0].recipe, recipes[i].recipe)) {
        if (d.key != key.name) continue;
        if (!differs) std::fill(row.values.begin(), row.values.end(), d.before);
        row.values[i] = d.after;
        differs = true;
      }
    }
    if (differs) rows.push_back(std::move(row));
  }
  return rows;
}

// --- texts -----------------------------------------------------------------------------------------------------------

struct Text {
  ComparedText about;
  TokenRange range;
  std::string hash;
};

std::string hash_of(const TokenRange& range) {
  constexpr std::int64_t block = 1 << 16;
  Hasher hasher;
  std::vector<std::int64_t> ids(block);
  for (std::int64_t at = 0; at < range.size; at += block) {
    check_interrupted();
    ids.resize(static_cast<std::size_t>(std::min(block, range.size - at)));
    range.file.read(range.begin + at, ids);
    hasher.add(std::as_bytes(std::span(ids)));
  }
  return hasher.hex();
}

// What to evaluate on, as named; fails where nothing of it is held out.
std::vector<std::string> text_paths(const EvalPlan& plan, const Recipe& recipe) {
  std::vector<std::string> paths = plan.data;
  if (paths.empty()) {
    for (const DataSource& source : recipe.data) paths.push_back(source.path);
  }
  for (const std::string& path : paths) {
    if (recipe.held_out > 0 || !find_training_data(recipe, path)) continue;
    fail("compare",
         "{}: all of it is used for training, so nothing is left to evaluate on; set held_out=0.1, or name another "
         "text under data in --eval FILE.",
         path);
  }
  return paths;
}

// All of a file; of one that is trained on, the part that is held out. recipe: with its text packed.
Text open_text(const std::string& path, const Recipe& recipe, const BaseModel& base, std::int64_t limit) {
  const std::optional<TrainingData> source = find_training_data(recipe, path);
  const bool trained_on = source && source->whole;
  const TokenFile file = open_tokens(trained_on ? token_path(recipe, source->index) : fs::path(path),
                                     known_vocabulary(base.tokenizer), base.config);
  Text text{{fs::path(path).stem().string(), path, 0, 0, trained_on}, {file, 0, file.size()}, ""};
  if (trained_on) {
    text.range.begin = held_out_begin(file, recipe.held_out, recipe.context);
    text.range.size -= text.range.begin;
    text.about.name += ", held out";
  }
  if (limit > 0) text.range.size = std::min(text.range.size, limit);
  text.about.first_token = text.range.begin;
  text.about.tokens = text.range.size;
  text.hash = hash_of(text.range);
  return text;
}

// The plan's contexts; by default powers of two times an eighth of the training context, up to twice that context, as
// far as the texts are long enough.
std::vector<std::int64_t> choose_contexts(const EvalPlan& plan, std::int64_t trained, const std::vector<Text>& texts) {
  if (!plan.contexts.empty()) return plan.contexts;
  std::vector<std::int64_t> contexts;
  for (std::int64_t context = std::max<std::int64_t>(2, trained / 8); context <= 2 * trained; context *= 2) {
    const bool fits = std::all_of(texts.begin(), texts.end(), [&](const Text& t) { return t.range.size > context; });
    if (fits) contexts.push_back(context);
    if (!fits) warn("skipping context {}: a text has fewer tokens", context);
  }
  if (contexts.empty()) {
    fail("compare",
         "{}: {} tokens are too few to evaluate on; raise held_out, or name another text under data in --eval FILE.",
         texts.front().about.path, texts.front().about.tokens);
  }
  return contexts;
}

// --- training --------------------------------------------------------------------------------------------------------

// The step that a run of this very recipe has reached, if there is one.
std::optional<std::int64_t> reached_step(const Recipe& recipe) {
  const fs::path folder = recipe.run;
  if (!is_run(folder)) return std::nullopt;
  const std::vector<RecipeDifference> changed = differences(RunFolder::recipe_in(folder), RunFolder::as_begun(recipe));
  if (std::any_of(changed.begin(), changed.end(), [](const RecipeDifference& d) { return d.affects_result; }))
    return {};
  const auto last = RunFolder::latest_in(folder);
  return last ? std::optional(last->step) : std::nullopt;
}

void require_not_trained_longer(const std::vector<NamedRecipe>& recipes) {
  for (const auto& [name, recipe] : recipes) {
    const auto step = reached_step(recipe);
    if (!step || *step <= recipe.steps) continue;
    fail("compare",
         "{}: was trained for {}, but the recipe asks for {}; set steps={} for all recipes, or choose "
         "other run folders with --runs DIR.",
         recipe.run, counted(*step, "step"), recipe.steps, *step);
  }
}

bool is_trained(const Recipe& recipe) {
  std::error_code status;
  return fs::is_directory(fs::path(recipe.run) / "adapter", status) && reached_step(recipe) == recipe.steps;
}

// Trains in this process: checkpoints make a kill harmless, and no child process can outlive its parent. Each run
// starts with trimmed memory, so that its peak memory does not include that of the runs before it.
void train_all(const std::vector<NamedRecipe>& recipes, const CompareOptions& options, World& world) {
  for (std::size_t i = 0; i < recipes.size(); ++i) {
    check_interrupted();
    const auto& [name, recipe] = recipes[i];
    if (world.broadcast(world.is_rank0() && is_trained(recipe) ? "trained" : "") == "trained") {
      say("[compare] {} of {}: {} is already trained", i + 1, recipes.size(), name);
      continue;
    }
    say("[compare] {} of {}: training {}, {}, in {}", i + 1, recipes.size(), name, counted(recipe.steps, "step"),
        recipe.run);
    start_memory_peak();
    train(recipe, options.version, world, options.describe_error);
  }
}

void read_training(const fs::path& run, const Recipe& recipe, Entry& entry) {
  // It grows with the steps: 200 bytes each.
  std::istringstream lines(read_text(run / "metrics.jsonl", std::uint64_t{4} << 30));
  std::vector<double> rates;
  for (const Json& each : read_machines(run)) {
    std::string machine = machine_text(each.value("machine", ""), each.value("threads", 1), each.value("ranks", 1));
    std::vector<std::string>& all = entry.cost.machines;
    if (std::find(all.begin(), all.end(), machine) == all.end()) all.push_back(std::move(machine));
  }
  for (std::string line; std::getline(lines, line);) {
    const Json json = parse_json(line, "compare", (run / "metrics.jsonl").string());
    const auto step = json.value("step", std::int64_t{0});
    if (json.contains("eval_loss")) entry.held_out_losses.push_back({step, json.value("eval_loss", 0.0)});
    if (!json.contains("loss")) continue;
    entry.losses.push_back({step, json.value("loss", 0.0)});
    rates.push_back(json.value("tokens_per_s", 0.0));
    entry.cost.peak_mb = std::max(entry.cost.peak_mb, json.value("peak_mb", 0.0));
  }
  if (rates.empty()) return;
  std::sort(rates.begin(), rates.end());
  entry.cost.tokens_per_s = rates[rates.size() / 2];
  entry.cost.step_seconds = static_cast<double>(recipe.batch * recipe.context) / entry.cost.tokens_per_s;
}

// --- measuring -------------------------------------------------------------------------------------------------------

// Finished evaluations: a file each, with a key that has all that the result depends on; a different key is evaluated
// again. Rank 0 reads and writes for all.
class EvaluationCache {
 public:
  EvaluationCache(fs::path folder, World& world) : folder_(std::move(folder)), world_(world) {}

  Json get(const std::string& name, const Json& key, const std::function<Json()>& measure) const {
    const fs::path file = folder_ / (name + ".json");
    const Json known = json_of_rank(0, world_.broadcast(world_.is_rank0() ? to_text(read(file, key)) : ""));
    if (!known.is_null()) return known;
    const Json value = measure();
    if (!world_.is_rank0()) return value;
    WholeFile out(file, /*replace=*/true);
    out.write(to_text(Json{{"key", key}, {"value", value}}, 1) + "\n");
    out.commit();
    return value;
  }

  // The partial sums of an evaluation in progress.
  fs::path sums(const std::string& name, const Json& key) const {
    Hasher hasher;
    hasher.add(to_text(key));
    return folder_ / fmt::format("{}.{}.sums", name, hasher.hex().substr(0, 12));
  }

  // Those of a finished evaluation.
  void remove_sums(const std::string& name, const Json& key) const {
    std::error_code ignored;
    if (world_.is_rank0()) fs::remove(sums(name, key), ignored);
  }

 private:
  static Json read(const fs::path& file, const Json& key) {
    std::error_code status;
    if (!fs::exists(file, status)) return {};
    const Json json = parse_json(read_text(file), "compare", file.string());
    const bool same = json.is_object() && json.value("key", Json()) == key && json.contains("value");
    return same ? json["value"] : Json();
  }

  fs::path folder_;
  World& world_;
};

// A model to evaluate, opened only if something is left to do.
class EvalTarget {
 public:
  EvalTarget(std::string name, const Recipe& recipe, bool is_base, at::Device device)
      : name_(std::move(name)), recipe_(recipe), device_(device) {
    identity_["base"] = recipe.init ? recipe_yaml(recipe) : recipe.model_hash;
    if (is_base) return;
    run_ = recipe.run;
    Hasher hasher;
    for (const char* file : {"adapter_model.safetensors", "adapter_config.json", "tapetune.json"}) {
      std::error_code status;
      if (const fs::path path = *run_ / "adapter" / file; fs::exists(path, status)) {
        hasher.add(MappedFile::open(path)->bytes());
      }
    }
    identity_["adapter"] = hasher.hex();
  }

  const std::string& name() const { return name_; }
  std::int64_t trained_context() const { return run_ ? recipe_.context : 0; }
  // All that an evaluation depends on, besides the text and the protocol.
  Json key(const std::string& version) const {
    Json key = identity_;
    key["dtype"] = recipe_.dtype;
    key["tapetune"] = version;
    return key;
  }
  const AdaptedModel& model() {
    if (model_) return *model_;
    if (run_) {
      model_.emplace(open_run(*run_, std::nullopt, device_).adapted);
    } else {
      const BaseModel base = open_base(recipe_, device_);
      model_.emplace(adapt(base.config, base.weights, parse_method("none", {}), base.dtype));
    }
    return *model_;
  }

 private:
  std::string name_;
  const Recipe& recipe_;
  at::Device device_;
  std::optional<fs::path> run_;
  Json identity_;
  std::optional<AdaptedModel> model_;
};

std::string file_name(std::string_view words) {
  std::string name(words);
  for (char& c : name) c = c == '/' || c == ' ' ? '-' : c;
  return name;
}

Json json_of(const ContextPerplexity& row) {
  return {{"context", row.context}, {"stride", row.stride}, {"windows", row.windows},
          {"tokens", row.tokens},   {"loss", row.loss},     {"perplexity", row.perplexity}};
}

ContextPerplexity perplexity_from(const Json& json) {
  return {json.at("context"),
          json.at("stride"),
          json.at("windows"),
          json.at("tokens"),
          json.at("loss"),
          json.at("perplexity"),
          {}};
}

std::int64_t count_parameters(const AdaptedModel& adapted) {
  std::int64_t count = 0;
  for (const Parameter& p : adapted.parameters) count += p.value.numel();
  return count;
}

PasskeyOptions passkey_options(const PasskeyPlan& plan, const std::vector<std::int64_t>& contexts) {
  PasskeyOptions options;
  options.contexts = contexts;
  options.trials = plan.trials;
  options.seed = static_cast<std::uint32_t>(plan.seed);
  // Evenly from the beginning to the end; a single depth is in the middle.
  for (std::int64_t i = 0; i < plan.depths; ++i) {
    options.depths.push_back(plan.depths == 1 ? 0.5 : static_cast<double>(i) / static_cast<double>(plan.depths - 1));
  }
  return options;
}

const std::vector<std::int64_t>& passkey_contexts(const PasskeyPlan& plan, const std::vector<std::int64_t>& otherwise) {
  return plan.contexts.empty() ? otherwise : plan.contexts;
}

// Fails if a prompt does not fit into a context, or there is no tokenizer for it.
void require_passkey(const PasskeyPlan& plan, const std::vector<std::int64_t>& contexts, const Llama& model,
                     const fs::path& folder) {
  if (!known_vocabulary(folder)) {
    fail("compare",
         "the base model has no tokenizer, which passkey retrieval needs; remove passkey from the --eval file.");
  }
  const Tokenizer tokenizer = Tokenizer::open(folder);
  PasskeyRun(model, tokenizer, passkey_options(plan, passkey_contexts(plan, contexts)));
}

class Measurements {
 public:
  Measurements(const CompareOptions& options, const std::vector<Text>& texts, std::vector<std::int64_t> contexts,
               fs::path tokenizer, World& world)
      : options_(options),
        world_(world),
        texts_(texts),
        contexts_(std::move(contexts)),
        tokenizer_(std::move(tokenizer)),
        cache_(options.out / "evaluations", world) {
    const TokenRange& range = texts.front().range;
    tokens_.resize(static_cast<std::size_t>(std::min({range.size, looked_at, contexts_.back()})));
    range.file.read(range.begin, tokens_);
    // Neighbours: rotary states turn so fast that tokens picked far apart would show aliasing.
    places_.resize(std::min<std::size_t>(pictured, tokens_.size()));
    std::iota(places_.begin(), places_.end(), 0);
  }

  const std::vector<std::int64_t>& places() const { return places_; }

  void measure(EvalTarget& target, Entry& entry) const {
    Json size_key = target.key(options_.version);
    size_key["trained_context"] = target.trained_context();
    const Json size = cache_.get(file_name(target.name()) + ".size", size_key, [&] {
      const AdaptedModel& adapted = target.model();
      return Json{{"context", adapted.model.config().longest_context()}, {"trained", count_parameters(adapted)}};
    });
    entry.context = size.at("context");
    entry.cost.trained_parameters = size.at("trained");
    for (std::size_t t = 0; t < texts_.size(); ++t) entry.perplexity.push_back(perplexity(target, t));
    entry.layers = layers(target);
    if (options_.plan.passkey) entry.passkey = passkey(target);
  }

 private:
  std::vector<ContextPerplexity> perplexity(EvalTarget& target, std::size_t t) const {
    std::vector<ContextPerplexity> rows;
    for (std::size_t i = 0; i < contexts_.size(); ++i) {
      const std::int64_t context = contexts_[i];
      PerplexityOptions settings;
      settings.protocol = options_.plan.protocol;
      settings.stride = options_.plan.stride;
      settings.contexts = {context};
      Json key = target.key(options_.version);
      key["text"] = texts_[t].hash;
      key["protocol"] = protocol_name(settings.protocol);
      key["stride"] = settings.stride;
      key["context"] = context;
      const std::string name = fmt::format("{}.text-{}.{}", file_name(target.name()), t + 1, context);
      const auto run = [&] {
        check_interrupted();
        say("[compare] {}: perplexity at {} tokens (context {} of {})", target.name(), context, i + 1,
            contexts_.size());
        PerplexityRun sums(target.model().model, texts_[t].range, settings);
        const ResumeFile resume_file{cache_.sums(name, key), target.name(), &world_};
        resume(sums, resume_file);
        return json_of(finish(sums, resume_file).at(0));
      };
      rows.push_back(perplexity_from(cache_.get(name, key, run)));
      cache_.remove_sums(name, key);
    }
    return rows;
  }

  std::vector<LayerPicture> layers(EvalTarget& target) const {
    Json key = target.key(options_.version);
    key["tokens"] = tokens_;
    key["places"] = places_;
    const Json found = cache_.get(file_name(target.name()) + ".layers", key, [&] {
      check_interrupted();
      Json list = Json::array();
      for (const LayerPicture& each : picture_layers(target.model().model, tokens_, places_)) {
        list.push_back({{"distance", each.distance}, {"position", each.position}});
      }
      return list;
    });
    std::vector<LayerPicture> pictures;
    for (const Json& each : found) pictures.push_back({each.at("distance"), each.at("position")});
    return pictures;
  }

  std::vector<RetrievalCell> passkey(EvalTarget& target) const {
    const PasskeyPlan& plan = *options_.plan.passkey;
    const std::vector<std::int64_t>& contexts = passkey_contexts(plan, contexts_);
    Json key = target.key(options_.version);
    key["passkey"] = {{"contexts", contexts}, {"depths", plan.depths}, {"trials", plan.trials}, {"seed", plan.seed}};
    const std::string name = file_name(target.name()) + ".passkey";
    const Json found = cache_.get(name, key, [&] {
      check_interrupted();
      say("[compare] {}: passkey", target.name());
      const Tokenizer tokenizer = Tokenizer::open(tokenizer_);
      PasskeyRun run(target.model().model, tokenizer, passkey_options(plan, contexts));
      const ResumeFile resume_file{cache_.sums(name, key), target.name(), &world_};
      resume(run, resume_file);
      Json list = Json::array();
      for (const PasskeyCell& cell : finish(run, resume_file)) {
        const double accuracy = static_cast<double>(cell.correct) / static_cast<double>(cell.trials);
        list.push_back({*cell.context, *cell.depth, cell.trials, cell.correct, accuracy});
      }
      return list;
    });
    cache_.remove_sums(name, key);
    std::vector<RetrievalCell> cells;
    for (const Json& each : found) cells.push_back({each.at(0), each.at(1), each.at(2), each.at(3), each.at(4)});
    return cells;
  }

  const CompareOptions& options_;
  World& world_;
  const std::vector<Text>& texts_;
  std::vector<std::int64_t> contexts_;
  fs::path tokenizer_;
  EvaluationCache cache_;
  std::vector<std::int64_t> tokens_, places_;
};

// The recipe with the lowest perplexity of those whose positions can be given to others.
const NamedRecipe& best_positions(const std::vector<NamedRecipe>& recipes, const Comparison& result) {
  const std::size_t context = headline_context(result);
  const auto rank = [&](const NamedRecipe& recipe) {
    const Entry& entry = result.entries[static_cast<std::size_t>(&recipe - recipes.data()) + 1];  // the base is first
    return std::tuple(positions_are_method(recipe.recipe, result.base_config.rope), theta_is_method(recipe.recipe),
                      entry.perplexity[0][context].perplexity);
  };
  return *std::min_element(recipes.begin(), recipes.end(),
                           [&](const NamedRecipe& a, const NamedRecipe& b) { return rank(a) < rank(b); });
}

std::string random_name(const Recipe& recipe) {
  return fmt::format("random weights ({} layers, width {}, seed {})", recipe.init->layers, recipe.init->hidden,
                     recipe.seed);
}

void write_whole(const fs::path& path, const std::string& text) {
  WholeFile file(path, /*replace=*/true);
  file.write(text);
  file.commit();
}

void make_folder(const fs::path& folder) {
  std::error_code status;
  fs::create_directories(folder, status);
  if (status) fail("compare", "{}: cannot be created: {}; choose another --out.", folder.string(), status.message());
}

}  // namespace

std::vector<NamedRecipe> read_recipes(const std::vector<std::string>& recipes, const std::vector<std::string>& settings,
                                      const fs::path& runs) {
  if (recipes.empty()) fail("compare", "no recipe given; name one or several before the key=value settings.");
  std::vector<NamedRecipe> named;
  std::set<std::string> names;
  for (const std::string& each : recipes) {
    const fs::path file = find_recipe(each);
    std::string name = file.stem().string();
    // "...yaml" would train in the folder above RUNS.
    if (name.starts_with('.')) fail("compare", "{}: a recipe's name must not begin with a dot; rename it.", each);
    if (!names.insert(name).second) {  // a/tape and b/tape
      name = fmt::format("{}-{}", file.parent_path().filename().string(), name);
      if (!names.insert(name).second)
        fail("compare", "{}: given twice, or another recipe has the same name; rename a copy.", each);
    }
    named.push_back({name, read_recipe(file, settings)});
    if (!runs.empty()) named.back().recipe.run = (runs / name).string();
  }
  return named;
}

Comparison compare(const std::vector<NamedRecipe>& given, const CompareOptions& options, World& world) {
  // Ranks stop at points that they agree on, which training and evaluation do.
  std::optional<HoldInterrupts> together;
  if (world.size() > 1) together.emplace();
  std::vector<NamedRecipe> recipes = given;
  require_own_folders(recipes);
  for (const NamedRecipe& each : recipes) {
    if (world.is_rank0()) RunFolder::require_ours(each.recipe.run);
  }
  require_comparable(recipes, world);
  const Recipe& first = recipes.front().recipe;

  Comparison result;
  std::vector<Text> texts;
  fs::path tokenizer;
  {
    // Before any training: every text, context and stride can be measured.
    const BaseModel base = open_base(first);
    tokenizer = base.tokenizer;
    result.base_config = base.config;
    const Recipe found = with_found_paths(first, first.run, /*say=*/false);
    const std::vector<std::string> paths = text_paths(options.plan, found);
    if (world.is_rank0()) require_not_trained_longer(recipes);
    // Once for all recipes, which have the same data.
    prepare_text(first, found, tokenizer, world);
    for (std::size_t i = 1; world.is_rank0() && i < recipes.size(); ++i) share_packed(found, recipes[i].recipe);
    for (const std::string& path : paths) texts.push_back(open_text(path, found, base, options.plan.limit));
    result.contexts = choose_contexts(options.plan, first.context, texts);
    PerplexityOptions settings;
    settings.protocol = options.plan.protocol;
    settings.stride = options.plan.stride;
    settings.contexts = result.contexts;
    const Llama model(base.config, base.weights, base.dtype);
    for (const Text& text : texts) PerplexityRun(model, text.range, settings);
    if (options.plan.passkey) require_passkey(*options.plan.passkey, result.contexts, model, tokenizer);
  }
  if (world.is_rank0()) {
    make_folder(options.out / "evaluations");
    remove_abandoned(options.out / "evaluations");
  }

  train_all(recipes, options, world);

  result.version = options.version;
  result.base = first.init ? random_name(first) : first.model;
  result.base_hash = first.model_hash;
  result.trained_context = first.context;
  result.steps = first.steps;
  result.tokens_per_step = first.batch * first.context;
  result.seed = first.seed;
  result.protocol = options.plan.protocol;
  for (const Text& text : texts) result.texts.push_back(text.about);
  result.differences = differing_settings(recipes);
  result.positions = position_groups(recipes, result.base_config.rope);
  result.date = utc_time();
  result.machine = machine_name();
  result.threads = at::get_num_threads();
  result.ranks = world.size();

  const Measurements measurements(options, texts, result.contexts, tokenizer, world);
  result.pictured = measurements.places();
  Entry base_row;
  base_row.name = base_entry;
  base_row.method = "none";
  EvalTarget base_target(std::string(base_entry), first, /*is_base=*/true, world.device());
  measurements.measure(base_target, base_row);
  result.entries.push_back(std::move(base_row));
  for (const NamedRecipe& each : recipes) {
    Entry entry;
    entry.name = each.name;
    entry.method = each.recipe.method.name();
    entry.settings = recipe_yaml(each.recipe);
    read_training(each.recipe.run, each.recipe, entry);
    EvalTarget target(each.name, each.recipe, /*is_base=*/false, world.device());
    measurements.measure(target, entry);
    result.entries.push_back(std::move(entry));
  }
  if (result.positions.size() > 1) {
    result.equal_positions =
        equal_positions_command(recipes, best_positions(recipes, result), result.base_config.rope, options);
  }
  return result;
}

void write_report(const Comparison& comparison, const fs::path& out) {
  make_folder(out / "charts");
  for (const auto& [name, text] : chart_files(comparison)) write_whole(out / "charts" / name, text);
  write_whole(out / "results.json", to_text(results_json(comparison), 1) + "\n");
  write_whole(out / "results.csv", results_csv(comparison));
  write_whole(out / "cost.csv", cost_csv(comparison));
  write_whole(out / "table.md", markdown(comparison));
  write_whole(out / "report.html", report_page(comparison));
}

}  // namespace tapetune
