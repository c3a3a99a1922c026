#include "train/trainer.h"

#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>

#include "adapters/peft.h"
#include "checkpoint/writer.h"
#include "core/error.h"
#include "core/file.h"
#include "core/log.h"
#include "core/progress.h"
#include "core/signals.h"
#include "core/trace.h"
#include "data/batches.h"
#include "distributed/data_parallel.h"
#include "distributed/layout.h"
#include "distributed/sequence.h"
#include "distributed/sharded_base.h"
#include "model/linear.h"
#include "model/loss.h"
#include "train/adamw.h"
#include "train/base.h"
#include "train/events.h"
#include "train/run_folder.h"
#include "train/schedule.h"

namespace tapetune {

namespace {

namespace fs = std::filesystem;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

double peak_megabytes() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) * 1024 / 1e6;
}

// Whatever a step draws depends on the recipe's seed and its place in the run, on nothing else.
std::uint64_t seed_of(std::uint64_t seed, std::int64_t step, std::int64_t sequence) {
  std::uint64_t x = seed * 0x9E3779B97F4A7C15U + static_cast<std::uint64_t>(step) * 0xBF58476D1CE4E5B9U +
                    static_cast<std::uint64_t>(sequence) * 0x94D049BB133111EBU;
  x = (x ^ (x >> 31)) * 0xD6E8FEB86659FD93U;
  return x ^ (x >> 32);
}

// The recipe with what its base model is by now; a recipe that says what it should be is held to it. One rank reads it
// all for that.
Recipe with_hash(Recipe recipe, World& world) {
  if (recipe.init) return recipe;
  const std::string hash = world.announce(world.leads() ? Checkpoint::open(recipe.model).hash() : "");
  if (!recipe.model_hash.empty() && recipe.model_hash != hash) {
    fail("train", "{}: its weights are {}, but the recipe's model_hash is {}; take the right model, or leave it out.",
         recipe.model, hash, recipe.model_hash);
  }
  recipe.model_hash = hash;
  return recipe;
}

Batches open_data(const Recipe& recipe, const BaseModel& base) {
  const std::optional<Vocabulary> vocabulary = known_vocabulary(base.tokenizer);
  std::vector<DataFile> files;
  files.reserve(recipe.data.size());
  for (const DataSource& source : recipe.data) {
    files.push_back({open_tokens(source.path, vocabulary, base.config),
                     recipe.data.size() > 1 ? std::optional(source.weight) : std::nullopt});
  }
  BatchSettings settings;
  settings.context = recipe.context;
  settings.seed = recipe.seed;
  settings.held_out = recipe.held_out;
  return {std::move(files), settings};
}

at::Tensor as_tensor(const std::vector<TokenIds>& rows) {
  std::vector<at::Tensor> tensors;
  tensors.reserve(rows.size());
  for (const TokenIds& row : rows) tensors.push_back(at::tensor(row, at::kLong));
  return at::stack(tensors);  // [R, context + 1]
}

// Who of the ranks computes what.
struct Layout {
  int teams = 1, team = 0;
  Group gradients, base, sequence;

  Layout(World& world, const Recipe& recipe)
      : teams(static_cast<int>(teams_of(recipe, world.size()))),
        team(world.rank() / static_cast<int>(recipe.sequence_parallel)),
        gradients(world.group("gradients")) {
    if (recipe.shard == "base") base = world.group("base");
    if (recipe.sequence_parallel > 1) sequence = world.group("sequence", team);
  }
};

std::uint64_t mixed(std::uint64_t hash, std::uint64_t number) { return (hash ^ number) * 0x100000001B3U; }

// What every rank must agree on. Weights are compared by the first bytes of each tensor, data by its size and by
// windows from all over it.
void require_same_run(World& world, const Recipe& recipe, const BaseModel& base, const Batches& batches,
                      const std::string& version) {
  if (world.size() == 1) return;
  world.require_same("a version of tapetune", version, "install the same everywhere");
  world.require_same("a recipe", recipe_yaml(recipe), "start all ranks with the same command");
  if (recipe.sequence_parallel > 1 && base.dtype != at::kFloat) {
    // Two ways to compute attention, and what it exchanges for its gradient differs.
    world.require_same("a way to compute in bf16", cpu_has_fast_bf16() ? "the processor's own" : "through f32",
                       "set dtype=f32, or take machines of one kind");
  }
  std::uint64_t weights = 0;
  for (const auto& [name, tensor] : named_weights(base.config, base.weights)) {
    constexpr std::int64_t numbers = 256;
    const at::Tensor begin = tensor.flatten().narrow(0, 0, std::min(numbers, tensor.numel())).cpu();
    const auto* bytes = static_cast<const std::uint8_t*>(begin.const_data_ptr());
    const std::size_t count = begin.nbytes();
    for (const std::uint8_t byte : std::span(bytes, count)) weights = mixed(weights, byte);
  }
  world.require_same("base weights", fmt::format("{:016x}", weights), "copy the same model to every machine");
  constexpr std::int64_t samples = 64;
  std::uint64_t hash = 0;
  for (std::int64_t i = 0; i < samples; ++i) {
    for (const auto id : batches.window(batches.windows() * i / samples)) {
      hash = mixed(hash, static_cast<std::uint64_t>(id));
    }
  }
  world.require_same("data", fmt::format("{} {:016x}", to_text(batches.state()), hash),
                     "copy the same token files to every machine");
}

// The name of the first tensor that is not all numbers: what trains, the base, then gradients.
std::string first_bad(const std::vector<Parameter>& parameters, const BaseModel& base) {
  const auto bad = [](const at::Tensor& t) { return t.defined() && !at::isfinite(t).all().item<bool>(); };
  for (const Parameter& p : parameters) {
    if (bad(p.value)) return p.name;
  }
  for (const auto& [name, tensor] : named_weights(base.config, base.weights)) {
    if (bad(tensor)) return name;
  }
  for (const Parameter& p : parameters) {
    if (bad(p.value.grad())) return "the gradient of " + p.name;
  }
  return "the loss";
}

// metrics.jsonl: a line a step. What a run that was cut off wrote after its last checkpoint is taken away first.
class Metrics {
 public:
  Metrics(const fs::path& path, std::int64_t keep_bytes) : path_(path) {
    std::error_code status;
    const auto size = fs::exists(path, status) ? static_cast<std::int64_t>(fs::file_size(path, status)) : 0;
    if (size < keep_bytes) warn("{}: lines of earlier steps are gone; it goes on without them", path.string());
    bytes_ = std::min(size, keep_bytes);
    if (size > bytes_) fs::resize_file(path, static_cast<std::uintmax_t>(bytes_), status);
    file_ = std::fopen(path.c_str(), "ab");
    if (status || file_ == nullptr) fail("train", "{}: cannot be written; check the run folder.", path.string());
  }
  ~Metrics() { std::fclose(file_); }
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  void line(const Json& json) {
    const std::string text = to_text(json) + "\n";
    if (std::fwrite(text.data(), 1, text.size(), file_) != text.size() || std::fflush(file_) != 0) {
      fail("train", "{}: cannot be written; is the disk full?", path_.string());
    }
    bytes_ += static_cast<std::int64_t>(text.size());
  }
  // A checkpoint that survives a loss of power must not count on lines that did not.
  std::int64_t bytes_on_disk() const {
    if (::fsync(::fileno(file_)) != 0) fail("train", "{}: cannot be written; is the disk full?", path_.string());
    return bytes_;
  }

 private:
  fs::path path_;
  std::FILE* file_ = nullptr;
  std::int64_t bytes_ = 0;
};

// What a run says of itself.
struct Log {
  Metrics metrics;
  EventFile events;
  Log(const RunFolder& run, const Recipe& recipe, std::int64_t metrics_bytes, std::int64_t events_bytes)
      : metrics(run.path() / "metrics.jsonl", metrics_bytes),
        events(run.path() / fmt::format("events.out.tfevents.{}.tapetune", recipe.seed), events_bytes) {}
  void sizes(std::int64_t& metrics_bytes, std::int64_t& events_bytes) const {
    metrics_bytes = metrics.bytes_on_disk();
    events_bytes = events.bytes();
  }
};

// Says when a loss stands out from those before it.
class SpikeWatch {
 public:
  void see(std::int64_t step, double loss) {
    if (count_ >= 20 && loss > mean_ + 6 * std::sqrt(variance_) + 0.1) {
      warn("step {}: the loss of {:.3f} stands out from the {:.3f} before it", step, loss, mean_);
    }
    const double weight = count_ < 20 ? 1.0 / static_cast<double>(count_ + 1) : 0.05, away = loss - mean_;
    mean_ += weight * away;
    variance_ = (1 - weight) * (variance_ + weight * away * away);
    ++count_;
  }

 private:
  double mean_ = 0, variance_ = 0;
  std::int64_t count_ = 0;
};

class Trainer {
 public:
  Trainer(const Recipe& recipe, const std::string& version, World& world)
      : world_(world),
        recipe_(with_hash(recipe, world)),
        base_(open_base(recipe, recipe.shard == "base" ? at::kCPU : world.device())),
        batches_(open_data(recipe, base_)),
        adapted_(start()),
        layout_((require_same_run(world, recipe_, base_, batches_, version), Layout(world, recipe_))),
        optimizer_(
            adapted_.parameters,
            {recipe.optimizer.beta1, recipe.optimizer.beta2, recipe.optimizer.eps, recipe.optimizer.weight_decay},
            layout_.base),
        exchange_(adapted_.parameters, layout_.gradients) {
    if (world.leads()) run_.emplace(recipe_, std::vector{fmt::format("tapetune {}", version)});
    for (const std::string& note : adapted_.notes) warn("{}", note);
    if (adapted_.parameters.empty()) fail("train", "method {} trains nothing; choose another.", recipe.method.method);
    schedule_.kind = recipe.schedule.kind == "cosine"   ? ScheduleKind::cosine
                     : recipe.schedule.kind == "linear" ? ScheduleKind::linear
                                                        : ScheduleKind::constant;
    schedule_.peak = recipe.optimizer.lr;
    schedule_.least = recipe.schedule.min_lr;
    schedule_.warmup = recipe.schedule.warmup;
    schedule_.steps = recipe.steps;
  }

  // Frozen weights go into parts when nobody needs them whole any more.
  void spread() {
    LlamaWeights weights = adapted_.model.weights();
    Parallel parallel;
    spread_sequences(parallel, layout_.sequence, adapted_.model.config());
    shard_base(weights, layout_.base, parallel, world_.device());
    if (layout_.base.size() > 1) base_.weights = {};
    adapted_.model.share(std::move(weights), std::move(parallel));
  }

  TrainResult run() {
    // A rank that left in the middle of a step would leave the others waiting.
    std::optional<HoldInterrupts> together;
    if (world_.size() > 1) together.emplace();
    resume();
    spread();
    TrainResult result;
    result.first_step = step_;
    std::optional<Log> log;
    if (world_.leads()) log.emplace(*run_, recipe_, metrics_bytes_, events_bytes_);
    const std::int64_t tokens = recipe_.batch * recipe_.context;
    Progress progress("train", static_cast<std::uint64_t>((recipe_.steps - step_) * tokens), "tokens");
    std::int64_t saved = step_;
    const auto save_now = [&] {
      if (log) log->sizes(metrics_bytes_, events_bytes_);
      save();
      saved = step_;
    };
    const auto evaluate_if_due = [&] {
      const bool due = recipe_.eval_every > 0 && (step_ % recipe_.eval_every == 0 || step_ == recipe_.steps);
      if (!due || evaluated_ == step_) return;
      const double held_out = evaluate();
      if (log) {
        log->metrics.line({{"step", step_}, {"eval_loss", held_out}, {"eval_perplexity", std::exp(held_out)}});
        log->events.scalar("eval_loss", step_, held_out);
      }
      evaluated_ = step_;
    };
    result.first_step_at = now();
    try {
      evaluate_if_due();  // which was cut off
      while (step_ < recipe_.steps) {
        const double begin = now();
        const std::uint64_t sent = bytes_sent();
        const double rate = schedule_.rate(step_);
        world_.begin_step(step_ + 1);
        loss_ = gradients();
        const double norm = guarded_norm();
        {
          const trace::Span span("optimiser");
          optimizer_.step(rate);
        }
        ++step_;
        const double seconds = now() - begin;
        spikes_.see(step_, loss_);
        if (log && (step_ % recipe_.log_every == 0 || step_ == recipe_.steps)) {
          Json line{{"step", step_},
                    {"loss", loss_},
                    {"lr", rate},
                    {"grad_norm", norm},
                    {"tokens", step_ * tokens},
                    {"tokens_per_s", static_cast<double>(tokens) / seconds},
                    {"peak_mb", peak_megabytes()}};
          if (world_.size() > 1) {
            line["ranks"] = world_.size();
            line["sent_bytes"] = bytes_sent() - sent;  // by this rank
          }
          log->metrics.line(line);
          log->events.scalar("loss", step_, loss_);
          log->events.scalar("lr", step_, rate);
          log->events.scalar("grad_norm", step_, norm);
          log->events.scalar("tokens_per_s", step_, static_cast<double>(tokens) / seconds);
        }
        evaluate_if_due();
        if (log) log->events.flush();
        progress.advance(static_cast<std::uint64_t>(tokens), fmt::format("step {} loss {:.4f}", step_, loss_));
        if (world_.size() == 1) check_interrupted();
        if (stop_) throw Interrupted("");
        if (recipe_.save_every > 0 && step_ % recipe_.save_every == 0 && step_ < recipe_.steps) {
          try {
            save_now();
          } catch (const Error& error) {
            // A full disk may have room again later; what is on it stays whole.
            warn("step {}: {} The run goes on; its last checkpoint is of step {}.", step_, error.what(), saved);
          }
        }
      }
    } catch (const Interrupted&) {
      // A step that was not finished changed no parameter.
      if (step_ > saved || step_ == 0) save_now();
      throw Interrupted(fmt::format("interrupted; saved at step {} of {}, the same command goes on from there", step_,
                                    recipe_.steps));
    }
    save_now();
    const fs::path adapter = fs::path(recipe_.run) / "adapter";
    if (world_.leads()) save_adapter(adapted_, adapter, base_.path, /*replace=*/true);
    world_.announce("saved");  // a run that could not be saved is none that ended well, on no rank
    result.steps = step_;
    result.loss = loss_;
    result.adapter = adapter.string();
    return result;
  }

 private:
  AdaptedModel start() const {
    AdaptedModel adapted =
        adapt(base_.config, base_.weights, recipe_.method, base_.dtype, recipe_.seed, world_.device());
    if (!recipe_.init_from.empty()) restore_parameters(adapted, base_.weights, recipe_.init_from);
    return adapted;
  }

  // The mean loss of a step's sequences; their gradients weigh by their tokens, whatever the micro-batch.
  double gradients() {
    for (const Parameter& p : adapted_.parameters) p.value.mutable_grad().reset();
    const auto tokens = static_cast<double>(recipe_.batch * recipe_.context);
    const std::int64_t own = recipe_.context / recipe_.sequence_parallel, first = own * layout_.sequence.rank();
    const std::int64_t stride = recipe_.micro_batch * layout_.teams;
    double sum = 0;
    for (std::int64_t begin = recipe_.micro_batch * layout_.team; begin < recipe_.batch; begin += stride) {
      check_interrupted();
      std::vector<TokenIds> rows;
      rows.reserve(static_cast<std::size_t>(recipe_.micro_batch));
      for (std::int64_t r = 0; r < recipe_.micro_batch; ++r) {
        rows.push_back(batches_.window(step_ * recipe_.batch + begin + r));
      }
      const at::Tensor all = as_tensor(rows);
      ForwardInput in;
      in.tokens = all.narrow(1, first, own);
      in.training = Training{recipe_.checkpointing, seed_of(recipe_.seed, step_, begin)};
      at::Tensor loss;
      {
        const trace::Span span("forward");
        const at::Tensor hidden = adapted_.model.forward(in).last.flatten(0, 1);  // [R N, hidden]
        loss = loss_sum(adapted_.model, hidden, all.narrow(1, first + 1, own).flatten(), in.training) / tokens;
      }
      const trace::Span span("backward");
      if (begin + stride >= recipe_.batch) exchange_.exchange_in_backward(loss);
      loss.backward();
      sum += loss.item<double>();
    }
    return summed(sum, true);
  }

  // Over all ranks; and whether one of them is to stop.
  double summed(double value, bool ask_to_stop) {
    if (world_.size() == 1) return value;
    const at::Tensor both =
        at::tensor({value, ask_to_stop && interrupted() ? 1.0 : 0.0}, at::kDouble).to(world_.device());
    layout_.gradients.sum(both).wait();
    if (ask_to_stop) stop_ = both[1].item<double>() > 0;
    return both[0].item<double>();
  }

  std::uint64_t bytes_sent() const {
    return layout_.gradients.bytes_sent() + layout_.base.bytes_sent() + layout_.sequence.bytes_sent();
  }

  double guarded_norm() {
    const double norm = optimizer_.clip(recipe_.optimizer.clip);
    if (std::isfinite(loss_) && std::isfinite(norm)) return norm;
    const auto last = run_ ? run_->latest() : std::nullopt;
    fail("train", "step {}: {} is not a number any more; the last good checkpoint is {}. Try a smaller optimizer.lr.",
         step_ + 1, first_bad(adapted_.parameters, base_), last ? last->folder.string() : "none yet");
  }

  double evaluate() {
    const c10::NoGradGuard evaluation;
    const trace::Span span("evaluation");
    const std::int64_t own = recipe_.context / recipe_.sequence_parallel, first = own * layout_.sequence.rank();
    const std::int64_t all = batches_.held_out();
    const std::int64_t count = recipe_.eval_windows > 0 ? std::min(recipe_.eval_windows, all) : all;
    double sum = 0;
    // All ranks run the model equally often, because they gather its weights together.
    for (std::int64_t round = 0; round < count; round += layout_.teams) {
      const std::int64_t i = round + layout_.team;
      const at::Tensor row = as_tensor({batches_.held_out_window(std::min(i, count - 1))});
      ForwardInput in;
      in.tokens = row.narrow(1, first, own);
      const at::Tensor hidden = adapted_.model.forward(in).last[0];
      const at::Tensor losses = token_losses(adapted_.model, hidden, row[0].narrow(0, first + 1, own));
      if (i < count) sum += losses.mean().item<double>();
    }
    return summed(sum, false) / static_cast<double>(std::max<std::int64_t>(1, count) * recipe_.sequence_parallel);
  }

  void save() {
    const std::map<std::string, at::Tensor> optimizer = optimizer_.state();
    if (!run_) return;
    run_->save(step_, recipe_.keep, [&](const fs::path& folder) {
      write_adapter_files(adapted_, folder, base_.path);
      save_safetensors(folder / "optimizer.safetensors", optimizer, false);
      OutputFile state(folder / "state.json");
      batches_.skip(step_ * recipe_.batch - batches_.position());
      const Json json{{"step", step_},
                      {"loss", loss_},
                      {"evaluated", evaluated_},
                      {"metrics_bytes", metrics_bytes_},
                      {"events_bytes", events_bytes_},
                      {"data", batches_.state()}};
      state.write(to_text(json, 2) + "\n");
      state.finish();
    });
  }

  // Rank 0 reads the last checkpoint; the others need no access to it.
  void resume() {
    const auto last = run_ ? run_->latest() : std::nullopt;
    const fs::path file = last ? last->folder / "state.json" : fs::path();
    const std::string text = world_.announce(last ? read_text(file) : "");
    if (text.empty()) return;
    std::map<std::string, at::Tensor> state;
    if (last) {
      restore_parameters(adapted_, base_.weights, last->folder);
      StoredTensors stored;
      map_safetensors(last->folder / "optimizer.safetensors", stored);
      for (const auto& [name, tensor] : stored) state[name] = tensor_from(tensor);
    }
    for (const Parameter& p : adapted_.parameters) layout_.gradients.broadcast(p.value.detach()).wait();
    optimizer_.restore(state, layout_.gradients);
    const Json json = parse_json(text, "train", file.string());
    step_ = json.at("step").get<std::int64_t>();
    loss_ = json.value("loss", 0.0);
    evaluated_ = json.value("evaluated", step_);
    metrics_bytes_ = json.at("metrics_bytes").get<std::int64_t>();
    events_bytes_ = json.value("events_bytes", std::int64_t{0});
    batches_.restore(json.at("data"));
  }

  World& world_;
  Recipe recipe_;
  BaseModel base_;
  Batches batches_;
  AdaptedModel adapted_;
  Layout layout_;
  AdamW optimizer_;
  DataParallel exchange_;
  std::optional<RunFolder> run_;  // rank 0's
  Schedule schedule_;
  SpikeWatch spikes_;
  std::int64_t step_ = 0;
  std::int64_t evaluated_ = 0;  // the last step that was, if any is
  std::int64_t metrics_bytes_ = 0, events_bytes_ = 0;
  double loss_ = 0;
  bool stop_ = false;  // a rank was asked to end
};

}  // namespace

TrainResult train(const Recipe& recipe, const std::string& version, World& world) {
  return Trainer(recipe, version, world).run();
}

}  // namespace tapetune
