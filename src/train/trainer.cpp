#include "train/trainer.h"

#include <sys/resource.h>
#include <unistd.h>

#include <ATen/Parallel.h>

#include "adapters/peft.h"
#include "checkpoint/finite.h"
#include "checkpoint/writer.h"
#include "core/clock.h"
#include "core/digits.h"
#include "core/error.h"
#include "core/file.h"
#include "core/log.h"
#include "core/machine.h"
#include "core/moment.h"
#include "core/progress.h"
#include "core/signals.h"
#include "core/trace.h"
#include "data/batches.h"
#include "distributed/data_parallel.h"
#include "distributed/mesh.h"
#include "distributed/sharded_base.h"
#include "distributed/ulysses.h"
#include "model/loss.h"
#include "train/adamw.h"
#include "train/base.h"
#include "train/checks.h"
#include "train/disk.h"
#include "train/inputs.h"
#include "train/record.h"
#include "train/run_data.h"
#include "train/run_folder.h"
#include "train/schedule.h"

namespace tapetune {

namespace {

namespace fs = std::filesystem;

double peak_megabytes() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) * 1024 / 1e6;
}

// Random draws depend on the recipe's seed, the step, and the sequence's place in the batch, on nothing else.
// Checkpoints say so, because before this they depended on the micro-batch.
constexpr const char* draws_by_sequence = "sequence";

at::Tensor as_tensor(const std::vector<TokenIds>& rows) {
  std::vector<at::Tensor> tensors;
  tensors.reserve(rows.size());
  for (const TokenIds& row : rows) tensors.push_back(at::tensor(row, at::kLong));
  return at::stack(tensors);  // [R, context + 1]
}

// Which rank computes what.
struct ProcessMesh {
  BatchShare share;
  int data_parallel_rank = 0;
  Group gradients, base, sequence;

  ProcessMesh(World& world, const Recipe& recipe)
      : share(share_batch(recipe, world.size())),
        data_parallel_rank(world.rank() / static_cast<int>(recipe.sequence_parallel)),
        gradients(world.group("gradients")) {
    if (recipe.shard == "base") base = world.group("base");
    if (recipe.sequence_parallel > 1) sequence = world.group("sequence", data_parallel_rank);
  }
};

std::string host_name() {
  char name[256] = "";
  return ::gethostname(name, sizeof name - 1) == 0 ? name : "unknown host";
}

class Trainer {
 public:
  Trainer(const Recipe& recipe, const std::string& version, World& world)
      : world_(world),
        found_(with_found_paths(recipe, recipe.run, world.is_rank0())),
        recipe_(with_hash(recipe, found_.model, world)),
        base_(open_base(found_, recipe.shard == "base" ? at::kCPU : world.device())),
        batches_((prepare_text(recipe_, found_, base_.tokenizer, world), open_batches(found_, base_))),
        data_sample_(batches_.sample_hash()),
        adapted_(start()),
        mesh_((require_same_run(world, recipe_, base_, batches_.state(), data_sample_, version),
               ProcessMesh(world, recipe_))),
        optimizer_(
            adapted_.parameters,
            {recipe.optimizer.beta1, recipe.optimizer.beta2, recipe.optimizer.eps, recipe.optimizer.weight_decay},
            mesh_.base),
        exchange_(adapted_.parameters, mesh_.gradients) {
    if (adapted_.parameters.empty()) {
      fail("train", "method {} has no trainable parameters; choose another.", recipe.method.name());
    }
    if (world.is_rank0()) {
      run_.emplace(recipe_, version);
      write_inputs(run_->path(), recipe_);
      log_.emplace(run_->path() / "train.log");
      say(fmt::format("tapetune {} on {} ({}): {}, {}, {}", version, host_name(), machine_name(),
                      counted(at::get_num_threads(), "thread"), counted(world.size(), "rank"), world.device().str()));
      warn_of_small_disk(run_disk(adapted_, recipe_), recipe_);
      note_windows_off(base_.config, recipe.method);
      if (!run_->latest()) {
        for (const std::string& each : adapted_.notes) note("{}", each);
        warn_beyond_scaling(base_.config, adapted_.model.config(), recipe.context);
      }
    }
    const BatchShare& share = mesh_.share;
    if (share.sequences < recipe.micro_batch) {
      note("micro_batch {} is lowered to {}: a batch of {} gives each {} {} sequence{}", recipe.micro_batch,
           share.micro_batch, recipe.batch, recipe.sequence_parallel > 1 ? "group of ranks" : "rank", share.sequences,
           share.sequences == 1 ? "" : "s");
    }
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
    ulysses(parallel, mesh_.sequence, adapted_.model.config());
    shard_base(weights, mesh_.base, parallel, world_.device());
    if (mesh_.base.size() > 1) base_.weights = {};
    adapted_.model.share(std::move(weights), std::move(parallel));
  }

  TrainResult run(const DescribeError& describe) {
    try {
      return run_steps();
    } catch (const Interrupted&) {
      throw;
    } catch (...) {
      say(fmt::format("error: {}", describe(std::current_exception())));
      throw;
    }
  }

 private:
  TrainResult run_steps() {
    // A rank that left in the middle of a step would leave the others waiting.
    std::optional<HoldInterrupts> together;
    if (world_.size() > 1) together.emplace();
    at_moment("resume");
    resume();
    spread();
    TrainResult result;
    result.first_step = step_;
    std::optional<Record> log;
    if (world_.is_rank0()) log.emplace(recipe_, metrics_bytes_, events_bytes_);
    const std::int64_t tokens = recipe_.batch * recipe_.context;
    const bool done = step_ >= recipe_.steps;
    if (step_ > 0 && world_.is_rank0()) {
      note("{}", done ? fmt::format("{} done already", counted(step_, "step"))
                      : fmt::format("resuming at step {} of {}", step_, recipe_.steps));
    }
    if (!done && world_.is_rank0()) record_machine(recipe_.run, step_, world_.size());
    if (!done) say(fmt::format("{} of {} tokens to do", counted(recipe_.steps - step_, "step"), grouped(tokens)));
    Progress progress("train", static_cast<std::uint64_t>(recipe_.steps * tokens), "tokens",
                      static_cast<std::uint64_t>(step_ * tokens));
    if (!done) progress.begin(fmt::format("step {}/{}", step_ + 1, recipe_.steps));
    StopMessage stopping;
    const auto stop_at = [&](std::int64_t step) {
      if (world_.is_rank0() && !quiet()) {
        stopping.set(fmt::format("stopping, saving step {}; press Ctrl-C again to stop now", step));
      }
    };
    // Alone, a step whose gradients are not complete is dropped. Several ranks agree to stop while they sum the loss,
    // and then end the step.
    const bool alone = world_.size() == 1;
    stop_at(alone ? step_ : step_ + 1);
    std::int64_t saved = step_;
    const auto save_now = [&] {
      require_finite();
      if (log) log->sizes(metrics_bytes_, events_bytes_);
      save();
      saved = step_;
      say(fmt::format("saved step {}, loss {:.4f}", step_, loss_));
    };
    const auto step_note = [&] { return fmt::format("step {}/{}  loss {:.4f}", step_, recipe_.steps, loss_); };
    const auto evaluate_if_due = [&] {
      const bool due = recipe_.eval_every > 0 && (step_ % recipe_.eval_every == 0 || step_ == recipe_.steps);
      if (!due || evaluated_ == step_) return;
      progress.begin("evaluating");
      const double held_out = evaluate();
      if (!std::isfinite(held_out)) fail_not_finite(step_, "the held-out loss");
      if (log) {
        log->metrics.line({{"step", step_}, {"eval_loss", held_out}, {"eval_perplexity", std::exp(held_out)}});
        log->events.scalar("eval_loss", step_, held_out);
      }
      say(fmt::format("step {}: held-out loss {:.4f}", step_, held_out));
      evaluated_ = step_;
      progress.begin(step_note());
    };
    result.first_step_at = monotonic_seconds();
    try {
      evaluate_if_due();  // which was cut off
      while (step_ < recipe_.steps) {
        const double begin = monotonic_seconds();
        const std::uint64_t sent = bytes_sent();
        const double rate = schedule_.rate(step_);
        world_.begin_step(step_ + 1);
        const double loss = gradients();
        stop_at(std::min(alone ? step_ + 1 : step_ + 2, recipe_.steps));
        if (alone && !stopping.was_printed()) check_interrupted();
        loss_ = loss;
        const double norm = guarded_norm();
        {
          const trace::Span span("optimiser");
          optimizer_.step(rate);
        }
        ++step_;
        at_moment("step");
        const double seconds = monotonic_seconds() - begin;
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
        progress.advance(static_cast<std::uint64_t>(tokens), step_note());
        evaluate_if_due();
        if (log) log->events.flush();
        if (alone) check_interrupted();
        if (stop_) throw Interrupted("");
        if (recipe_.save_every > 0 && step_ % recipe_.save_every == 0 && step_ < recipe_.steps) {
          try {
            save_now();
          } catch (const NotFinite&) {
            throw;
          } catch (const Error& error) {
            // A full disk may have room again later; what is on it stays whole.
            warn("step {}: {} Training continues; the last checkpoint is of step {}.", step_, error.what(), saved);
          }
        }
      }
    } catch (const Interrupted&) {
      // A step that was not finished changed no parameter.
      if (step_ > saved || step_ == 0) save_now();
      const std::string text =
          fmt::format("interrupted; saved at step {} of {}; rerun the same command to resume", step_, recipe_.steps);
      say(text);
      throw Interrupted(text);
    }
    result.seconds = monotonic_seconds() - result.first_step_at;
    if (!done) result.tokens_per_s = static_cast<double>((step_ - result.first_step) * tokens) / result.seconds;
    save_now();
    const fs::path adapter = fs::path(recipe_.run) / "adapter";
    if (world_.is_rank0()) {
      save_adapter(adapted_, adapter, base_.path, /*replace=*/true, StagedFolder::Others::keep);
    }
    world_.broadcast("saved");  // a run that could not be saved is none that ended well, on no rank
    result.steps = step_;
    result.loss = loss_;
    result.peak_mb = peak_megabytes();
    result.adapter = adapter.string();
    if (!done)
      say(fmt::format("finished: {}, last loss {:.4f}, {:.0f} tokens/s, {}, peak memory {:.0f} MB",
                      counted(result.steps, "step"), result.loss, result.tokens_per_s, time_text(result.seconds),
                      result.peak_mb));
    return result;
  }

  // For train.log.
  void say(const std::string& text) {
    if (log_) log_->line(text);
  }

  AdaptedModel start() const {
    AdaptedModel adapted =
        adapt(base_.config, base_.weights, recipe_.method, base_.dtype, recipe_.seed, world_.device());
    if (!found_.init_from.empty()) restore_parameters(adapted, base_.weights, found_.init_from);
    return adapted;
  }

  // The mean loss of a step's sequences; their gradients weigh by their tokens, whatever the micro-batch.
  double gradients() {
    for (const Parameter& p : adapted_.parameters) p.value.mutable_grad().reset();
    const auto tokens = static_cast<double>(recipe_.batch * recipe_.context);
    const std::int64_t own = recipe_.context / recipe_.sequence_parallel, first = own * mesh_.sequence.rank();
    const BatchShare& share = mesh_.share;
    const std::int64_t end = share.sequences * (mesh_.data_parallel_rank + 1);
    double sum = 0;
    for (std::int64_t begin = share.sequences * mesh_.data_parallel_rank; begin < end; begin += share.micro_batch) {
      check_interrupted();
      std::vector<TokenIds> rows;
      for (std::int64_t r = begin; r < std::min(begin + share.micro_batch, end); ++r) {
        rows.push_back(batches_.window(step_ * recipe_.batch + r));
      }
      const at::Tensor all = as_tensor(rows);
      ForwardInput in;
      in.tokens = all.narrow(1, first, own);
      in.training = Training{recipe_.checkpointing, draw(recipe_.seed, static_cast<std::uint64_t>(step_))};
      in.training->first_sequence = begin;
      at::Tensor loss;
      {
        const trace::Span span("forward");
        const at::Tensor hidden = adapted_.model.forward(in).last;  // [R, N, hidden]
        loss = loss_sum(adapted_.model, hidden, all.narrow(1, first + 1, own), in.training) / tokens;
      }
      const trace::Span span("backward");
      if (begin + share.micro_batch >= end) exchange_.exchange_in_backward(loss);
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
    mesh_.gradients.all_reduce(both).wait();
    if (ask_to_stop) stop_ = both[1].item<double>() > 0;
    return both[0].item<double>();
  }

  std::uint64_t bytes_sent() const {
    return mesh_.gradients.bytes_sent() + mesh_.base.bytes_sent() + mesh_.sequence.bytes_sent();
  }

  double guarded_norm() {
    const double norm = optimizer_.clip(recipe_.optimizer.clip);
    if (!std::isfinite(loss_) || !std::isfinite(norm)) fail_not_finite(step_ + 1, "the loss");
    return norm;
  }

  // What the last step made, before it is saved: a gradient that is finite may still make parameters that are not. All
  // ranks agree, so that none waits for another.
  void require_finite() {
    const std::string bad = bad_parameter(adapted_.parameters), moments = optimizer_.first_not_finite();
    if (summed(bad.empty() && moments.empty() ? 0 : 1, false) == 0) return;
    fail_not_finite(step_, bad.empty() && !moments.empty() ? "the optimizer state of " + moments : "the update");
  }

  [[noreturn]] void fail_not_finite(std::int64_t step, const std::string& otherwise) {
    if (const std::string name = bad_base_weight(base_); !name.empty()) {
      throw_not_finite(
          "train",
          fmt::format("step {}: the base model's weight {} has NaN or Inf; {} is damaged, download or copy it again.",
                      step, name, base_.path));
    }
    std::string name = bad_parameter(adapted_.parameters);
    if (name.empty()) name = bad_gradient(adapted_.parameters);
    std::string good;
    if (run_) {
      const auto last = run_->latest_finite();
      good = fmt::format("; the last good checkpoint is {}", last ? last->folder.string() : "none yet");
    }
    throw_not_finite("train", fmt::format("step {}: {} is NaN or Inf{}. Try a smaller optimizer.lr.", step,
                                          name.empty() ? otherwise : name, good));
  }

  double evaluate() {
    const c10::NoGradGuard evaluation;
    const trace::Span span("evaluation");
    const std::int64_t own = recipe_.context / recipe_.sequence_parallel, first = own * mesh_.sequence.rank();
    const std::int64_t all = batches_.held_out();
    const std::int64_t count = recipe_.eval_windows > 0 ? std::min(recipe_.eval_windows, all) : all;
    double sum = 0;
    // All ranks run the model equally often, because they gather its weights together.
    for (std::int64_t round = 0; round < count; round += mesh_.share.data_parallel_size) {
      const std::int64_t i = round + mesh_.data_parallel_rank;
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
      at_moment("saving");
      save_safetensors(folder / "optimizer.safetensors", optimizer, false);
      at_moment("saving");
      OutputFile state(folder / "state.json");
      batches_.skip(step_ * recipe_.batch - batches_.position());
      const Json json{{"step", step_},
                      {"loss", loss_},
                      {"evaluated", evaluated_},
                      {"draws", draws_by_sequence},
                      {"metrics_bytes", metrics_bytes_},
                      {"events_bytes", events_bytes_},
                      {"data", batches_.state()},
                      {"data_sample", data_sample_}};
      state.write(to_text(json, 2) + "\n");
      state.finish();
      at_moment("saving");
    });
  }

  // Rank 0 reads the last checkpoint; the others need no access to it.
  void resume() {
    const auto last = run_ ? run_->latest_undamaged() : std::nullopt;
    const fs::path file = last ? last->folder / "state.json" : fs::path();
    const std::string text = world_.broadcast(last ? read_text(file) : "");
    if (text.empty()) return;
    std::map<std::string, at::Tensor> state;
    if (last) {
      restore_parameters(adapted_, base_.weights, last->folder);
      StoredTensors stored;
      map_safetensors(last->folder / "optimizer.safetensors", stored);
      for (const auto& [name, tensor] : stored) state[name] = tensor_from(tensor);
    }
    for (const Parameter& p : adapted_.parameters) mesh_.gradients.broadcast(p.value.detach()).wait();
    optimizer_.restore(state, mesh_.gradients);
    const Json json = parse_json(text, "train", file.string());
    step_ = json.at("step").get<std::int64_t>();
    loss_ = json.value("loss", 0.0);
    evaluated_ = json.value("evaluated", step_);
    const Components& parts = adapted_.model.components();
    const bool draws = parts.adapter->draws() || parts.positions->draws();
    if (draws && json.value("draws", "") != draws_by_sequence) {
      warn(
          "{}: an earlier version of tapetune began this run; from step {} on, dropout and random offsets are drawn "
          "for each sequence instead of each micro-batch.",
          recipe_.run, step_ + 1);
    }
    metrics_bytes_ = json.at("metrics_bytes").get<std::int64_t>();
    events_bytes_ = json.value("events_bytes", std::int64_t{0});
    batches_.restore(json.at("data"));
    // Earlier versions kept no sample.
    if (const std::string sample = json.value("data_sample", data_sample_); sample != data_sample_) {
      fail("train",
           "{}: the tokens are not those that step {} was trained on: the files have the same size and other tokens; "
           "restore {}, or choose another run folder.",
           token_names(found_), step_, found_.data.size() > 1 ? "them" : "it");
    }
  }

  World& world_;
  Recipe found_;   // with its paths as they are found
  Recipe recipe_;  // as written, which is what the run folder keeps
  BaseModel base_;
  Batches batches_;
  std::string data_sample_;
  AdaptedModel adapted_;
  ProcessMesh mesh_;
  AdamW optimizer_;
  DataParallel exchange_;
  std::optional<RunFolder> run_;  // rank 0's
  std::optional<LogFile> log_;    // train.log
  Schedule schedule_;
  SpikeWatch spikes_;
  std::int64_t step_ = 0;
  std::int64_t evaluated_ = 0;  // the last step that was, if any is
  std::int64_t metrics_bytes_ = 0, events_bytes_ = 0;
  double loss_ = 0;
  bool stop_ = false;  // a rank was asked to end
};

}  // namespace

TrainResult train(const Recipe& recipe, const std::string& version, World& world, const DescribeError& describe) {
  if (world.is_rank0()) RunFolder::require_ours(recipe.run);
  return Trainer(RunFolder::as_begun(recipe), version, world).run(describe);
}

}  // namespace tapetune
