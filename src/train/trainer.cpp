#include "train/trainer.h"

#include <sys/resource.h>

#include <cmath>

#include "adapters/peft.h"
#include "checkpoint/finite.h"
#include "core/clock.h"
#include "core/digits.h"
#include "core/error.h"
#include "core/log.h"
#include "core/moment.h"
#include "core/progress.h"
#include "core/signals.h"
#include "run/record.h"
#include "run/run_folder.h"
#include "train/checks.h"
#include "train/resume.h"
#include "train/schedule.h"
#include "train/setup.h"
#include "train/step.h"

namespace tapetune {

namespace {

double peak_megabytes() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) * 1024 / 1e6;
}

Schedule schedule_of(const Recipe& recipe) {
  Schedule schedule;
  schedule.kind = recipe.schedule.kind == "cosine"   ? ScheduleKind::cosine
                  : recipe.schedule.kind == "linear" ? ScheduleKind::linear
                                                     : ScheduleKind::constant;
  schedule.peak = recipe.optimizer.lr;
  schedule.least = recipe.schedule.min_lr;
  schedule.warmup = recipe.schedule.warmup;
  schedule.steps = recipe.steps;
  return schedule;
}

// From the step that was resumed to the last one, with what is written and shown on the way.
class TrainLoop {
 public:
  TrainLoop(TrainSetup& setup, const TrainProgress& at)
      : setup_(setup),
        recipe_(setup.recipe),
        schedule_(schedule_of(setup.recipe)),
        alone_(setup.world.size() == 1),
        rank0_(setup.world.is_rank0()),
        tokens_(recipe_.batch * recipe_.context),
        first_step_(at.step),
        at_(at),
        saved_(at.step),
        bar_("train", static_cast<std::uint64_t>(recipe_.steps * tokens_), "tokens",
             static_cast<std::uint64_t>(at.step * tokens_)) {}

  TrainResult run() {
    begin();
    const double first_step_at = monotonic_seconds();
    try {
      evaluate_if_due();  // which was cut off
      while (at_.step < recipe_.steps) {
        const bool stop = step();
        evaluate_if_due();
        if (record_) record_->events.flush();
        if (alone_) check_interrupted();
        if (stop) throw Interrupted("");
        save_if_due();
      }
    } catch (const Interrupted&) {
      save_interrupted();
    }
    const double seconds = monotonic_seconds() - first_step_at;
    save();
    return finish(first_step_at, seconds);
  }

 private:
  bool has_steps() const { return first_step_ < recipe_.steps; }

  void begin() {
    if (rank0_) record_.emplace(recipe_, at_.metrics_bytes, at_.events_bytes);
    if (at_.step > 0 && rank0_) {
      note("{}", has_steps() ? fmt::format("resuming at step {} of {}", at_.step, recipe_.steps)
                             : fmt::format("{} done already", counted(at_.step, "step")));
    }
    if (has_steps()) {
      if (rank0_) record_machine(recipe_.run, at_.step, setup_.world.size());
      setup_.say(fmt::format("{} of {} tokens to do", counted(recipe_.steps - at_.step, "step"), grouped(tokens_)));
      bar_.begin(fmt::format("step {}/{}", at_.step + 1, recipe_.steps));
    }
    // Alone, a step whose gradients are not complete is dropped. Several ranks agree to stop while they sum the loss,
    // and then end the step.
    announce_stop_at(alone_ ? at_.step : at_.step + 1);
  }

  // What a signal from now on prints.
  void announce_stop_at(std::int64_t step) {
    if (!rank0_ || quiet()) return;
    stopping_.set(fmt::format("stopping, saving step {}; press Ctrl-C again to stop now", step));
  }

  // Whether a rank was asked to stop meanwhile.
  bool step() {
    const double begin = monotonic_seconds();
    const std::uint64_t sent = setup_.mesh.bytes_sent();
    const double rate = schedule_.rate(at_.step);
    setup_.world.begin_step(at_.step + 1);
    const StepResult result = train_step(setup_, at_.step, rate, [&] {
      announce_stop_at(std::min(alone_ ? at_.step + 1 : at_.step + 2, recipe_.steps));
      if (alone_ && !stopping_.was_printed()) check_interrupted();
    });
    at_.loss = result.loss;
    ++at_.step;
    at_moment("step");
    const double seconds = monotonic_seconds() - begin;
    spikes_.see(at_.step, at_.loss);
    if (record_ && (at_.step % recipe_.log_every == 0 || at_.step == recipe_.steps)) {
      record_step(rate, result.gradient_norm, static_cast<double>(tokens_) / seconds, sent);
    }
    bar_.advance(static_cast<std::uint64_t>(tokens_), step_note());
    return result.asked_to_stop;
  }

  void record_step(double rate, double gradient_norm, double tokens_per_s, std::uint64_t sent_before) {
    Json line{{"step", at_.step},
              {"loss", at_.loss},
              {"lr", rate},
              {"grad_norm", gradient_norm},
              {"tokens", at_.step * tokens_},
              {"tokens_per_s", tokens_per_s},
              {"peak_mb", peak_megabytes()}};
    if (!alone_) {
      line["ranks"] = setup_.world.size();
      line["sent_bytes"] = setup_.mesh.bytes_sent() - sent_before;  // by this rank
    }
    record_->metrics.line(line);
    record_->events.scalar("loss", at_.step, at_.loss);
    record_->events.scalar("lr", at_.step, rate);
    record_->events.scalar("grad_norm", at_.step, gradient_norm);
    record_->events.scalar("tokens_per_s", at_.step, tokens_per_s);
  }

  std::string step_note() const { return fmt::format("step {}/{}  loss {:.4f}", at_.step, recipe_.steps, at_.loss); }

  void evaluate_if_due() {
    const bool due = recipe_.eval_every > 0 && (at_.step % recipe_.eval_every == 0 || at_.step == recipe_.steps);
    if (!due || at_.evaluated == at_.step) return;
    bar_.begin("evaluating");
    const double loss = held_out_loss(setup_);
    if (!std::isfinite(loss)) fail_not_finite(setup_, at_.step, "the held-out loss");
    if (record_) {
      record_->metrics.line({{"step", at_.step}, {"eval_loss", loss}, {"eval_perplexity", std::exp(loss)}});
      record_->events.scalar("eval_loss", at_.step, loss);
    }
    setup_.say(fmt::format("step {}: held-out loss {:.4f}", at_.step, loss));
    at_.evaluated = at_.step;
    bar_.begin(step_note());
  }

  void save() {
    require_finite(setup_, at_.step);
    if (record_) record_->sizes(at_.metrics_bytes, at_.events_bytes);
    save_checkpoint(setup_, at_);
    saved_ = at_.step;
    setup_.say(fmt::format("saved step {}, loss {:.4f}", at_.step, at_.loss));
  }

  void save_if_due() {
    if (recipe_.save_every == 0 || at_.step % recipe_.save_every != 0 || at_.step >= recipe_.steps) return;
    try {
      save();
    } catch (const NotFinite&) {
      throw;
    } catch (const Error& error) {
      // A full disk may have room again later; what is on it stays whole.
      warn("step {}: {} Training continues; the last checkpoint is of step {}.", at_.step, error.what(), saved_);
    }
  }

  // A step that was not finished changed no parameter.
  [[noreturn]] void save_interrupted() {
    if (at_.step > saved_ || at_.step == 0) save();
    const std::string text =
        fmt::format("interrupted; saved at step {} of {}; rerun the same command to resume", at_.step, recipe_.steps);
    setup_.say(text);
    throw Interrupted(text);
  }

  TrainResult finish(double first_step_at, double seconds) {
    TrainResult result;
    result.first_step = first_step_;
    result.first_step_at = first_step_at;
    result.seconds = seconds;
    if (has_steps()) result.tokens_per_s = static_cast<double>((at_.step - first_step_) * tokens_) / seconds;
    const std::filesystem::path adapter = std::filesystem::path(recipe_.run) / "adapter";
    if (rank0_) {
      save_adapter(setup_.adapted, adapter, setup_.base.path, /*replace=*/true, StagedFolder::Others::keep);
    }
    setup_.world.broadcast("saved");  // a run that could not be saved is none that ended well, on no rank
    result.steps = at_.step;
    result.loss = at_.loss;
    result.peak_mb = peak_megabytes();
    result.adapter = adapter.string();
    if (has_steps()) {
      setup_.say(fmt::format("finished: {}, last loss {:.4f}, {:.0f} tokens/s, {}, peak memory {:.0f} MB",
                             counted(result.steps, "step"), result.loss, result.tokens_per_s, time_text(result.seconds),
                             result.peak_mb));
    }
    return result;
  }

  TrainSetup& setup_;
  const Recipe& recipe_;
  Schedule schedule_;
  bool alone_, rank0_;
  std::int64_t tokens_;  // of a batch
  std::int64_t first_step_;
  TrainProgress at_;
  std::int64_t saved_;            // step of the last checkpoint
  std::optional<Record> record_;  // rank 0's
  SpikeWatch spikes_;
  Progress bar_;
  StopMessage stopping_;
};

}  // namespace

TrainResult train(const Recipe& recipe, const std::string& version, World& world, const DescribeError& describe) {
  if (world.is_rank0()) RunFolder::require_ours(recipe.run);
  TrainSetup setup = open_setup(RunFolder::as_begun(recipe), version, world);
  begin_run(setup, version);
  try {
    // A rank that left in the middle of a step would leave the others waiting.
    std::optional<HoldInterrupts> together;
    if (world.size() > 1) together.emplace();
    at_moment("resume");
    const TrainProgress at = resume(setup);
    parallelize(setup);
    return TrainLoop(setup, at).run();
  } catch (const Interrupted&) {
    throw;
  } catch (...) {
    setup.say(fmt::format("error: {}", describe(std::current_exception())));
    throw;
  }
}

}  // namespace tapetune
