#include "train/run/loop.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "logitless/error.h"
#include "logitless/memory.h"
#include "train/run/stop_signals.h"
#include "train/run/stopwatch.h"

namespace logitless::train {
namespace {

constexpr std::int64_t kValidationTokens = 16384;
constexpr double kSecondsBetweenLines = 2.0;

// Returns the far field's part of a progress line.
std::string far_text(const FarFieldReport& r) {
  std::string text =
      fmt::format("  far field: dense {} of {}, orders {}", r.dense_steps, r.steps, r.refreshes);
  if (r.audits > 0)
    text += fmt::format(", selected {:.1f} %, error {:.2g}", 100.0 * r.mean_selected, r.last_error);
  return text;
}

// Runs steps with progress lines, until all are done.
class Loop {
 public:
  Loop(const RunOptions& options, bool listens, Trainer& trainer, RunReport& report, RunLog& log,
       const Print& print)
      : o_(options),
        listens_(listens),
        trainer_(trainer),
        report_(report),
        log_(log),
        print_(print),
        tokens_before_(trainer.windows_read() * options.length) {}

 private:
  // Returns act(). When the run diverges, adds to the error how to continue.
  template <typename Act>
  auto checked(Act&& act) const {
    try {
      return act();
    } catch (const Diverged& error) {
      log_end(fmt::format("diverged: {}", error.what()));
      throw Error(error.what() + (o_.save.empty() ? "" : "; " + what_is_saved()));
    }
  }

 public:
  void run() {
    std::optional<StopSignals> stop;
    if (listens_) stop.emplace();
    // With several ranks, the result of a step carries a signal of one rank to all.
    const auto caught = [&] { return stop ? stop->caught() : 0; };
    const auto asked = [&] { return trainer_.ranks() == 1 ? caught() : noted_; };
    while (trainer_.steps_done() < o_.steps) {
      Stopwatch watch;
      take(checked([&] { return trainer_.start_step(caught()); }));
      const std::int64_t step = trainer_.steps_done();
      const bool due = step == o_.steps || step % o_.steps_between_validations() == 0;
      // A GPU may run a step behind, except before validations and checkpoints.
      const bool look = due || asked() != 0;
      if (look) take(checked([&] { return trainer_.finish_step(); }));
      report_.seconds.push_back(watch.seconds());
      seconds_ += report_.seconds.back();
      log_steps();
      const std::int64_t known = std::ssize(report_.steps);
      if (known > printed_steps_ &&
          (known == 1 || step == o_.steps || since_line_.seconds() > kSecondsBetweenLines))
        print_step();
      const int signal = asked();
      if (due && signal == 0) pause(step);
      if (look && signal != 0) {
        end_early(step, signal);
        break;
      }
    }
    // A checkpoint of a finished run: only validate and save it.
    if (report_.steps.empty()) pause(trainer_.steps_done());
    log_end(report_.signal != 0 ? name_of_signal(report_.signal) : "done");
    report_.tokens_per_second =
        seconds_ > 0.0 ? static_cast<double>(tokens(std::ssize(report_.steps))) / seconds_ : 0.0;
  }

 private:
  std::int64_t steps_known() const { return report_.first_step + std::ssize(report_.steps); }
  // Logs the steps whose results are known; a GPU's are a step late.
  void log_steps() {
    for (; logged_ < std::min(report_.steps.size(), report_.seconds.size()); ++logged_) {
      const StepResult& r = report_.steps[logged_];
      const auto done = static_cast<std::int64_t>(logged_) + 1;
      const double seconds = report_.seconds[logged_];
      Json line = {{"kind", "step"},
                   {"step", report_.first_step + done},
                   {"tokens", tokens_before_ + tokens(done)},
                   {"loss", r.loss},
                   {"lr", r.rate},
                   {"grad_norm", r.norm},
                   {"seconds", seconds},
                   {"tokens_per_second", static_cast<double>(tokens(1)) / std::max(seconds, 1e-9)}};
      if (const FarFieldHead* far = trainer_.far_field(); far != nullptr)
        line["far_field"] = to_json(far->report());
      log_.write(line);
    }
  }
  void log_validation(const RunReport::Validation& v, double seconds) {
    log_.write({{"kind", "validation"},
                {"step", v.step},
                {"loss", v.loss},
                {"perplexity", std::exp(v.loss)},
                {"seconds", seconds}});
  }
  // Also called for a run without steps, which logs a line only for a failed save.
  void log_end(const std::string& reason) const {
    log_.write({{"kind", "end"},
                {"step", steps_known()},
                {"reason", reason},
                {"memory", to_json(trainer_.memory())},
                {"process_peak_bytes", process_peak_bytes()}});
  }

  std::int64_t tokens(std::int64_t steps) const { return steps * o_.tokens_of_step(); }

  void take(const std::optional<StepResult>& result) {
    if (!result) return;
    report_.steps.push_back(*result);
    noted_ = std::max(noted_, result->note);
  }

  void print_step() {
    const std::int64_t step = report_.first_step + std::ssize(report_.steps);
    const StepResult& r = report_.steps.back();
    const std::int64_t done = std::ssize(report_.steps) - printed_steps_;
    const FarFieldHead* far = trainer_.far_field();
    print_(
        fmt::format("step {:>{}}/{}  loss {:.4f}  lr {:.2e}  norm {:.3f}  {:.0f} tokens/s{}", step,
                    fmt::formatted_size("{}", o_.steps), o_.steps, r.loss, r.rate, r.norm,
                    static_cast<double>(tokens(done)) / std::max(seconds_ - printed_seconds_, 1e-9),
                    far != nullptr ? far_text(far->report()) : ""));
    printed_steps_ = std::ssize(report_.steps);
    printed_seconds_ = seconds_;
    since_line_ = Stopwatch();
  }

  void pause(std::int64_t step) {
    const std::int64_t windows = std::max<std::int64_t>(1, kValidationTokens / o_.length);
    const Stopwatch watch;
    report_.validations.push_back({step, checked([&] {
                                     try {
                                       return trainer_.validate(windows);
                                     } catch (const Diverged&) {
                                       throw;
                                     } catch (...) {
                                       save(step);  // save the weights although validation failed
                                       throw;
                                     }
                                   })});
    log_validation(report_.validations.back(), watch.seconds());
    const double loss = report_.validations.back().loss;
    print_(fmt::format("step {}: validation loss {:.4f}, perplexity {:.2f}", step, loss,
                       std::exp(loss)));
    save(step);
  }

  // Saves a checkpoint. A full disk does not end the run: the old file stays, and a later
  // checkpoint may fit.
  void save(std::int64_t step) {
    if (o_.save.empty() || step == saved_) return;
    try {
      checked([&] {
        trainer_.save(o_.save, options_text(o_));
        return 0;
      });
    } catch (const DeviceError& error) {
      report_.save_failure = fmt::format("the checkpoint of step {} cannot be written: {}; {}",
                                         step, error.what(), what_is_saved());
      print_(report_.save_failure + "; the run goes on");
      return;
    }
    report_.save_failure.clear();
    saved_ = step;
  }
  std::string what_is_saved() const {
    if (saved_ >= 0) return fmt::format("'{}' has step {}", o_.save, saved_);
    return fmt::format("'{}' was not written", o_.save);
  }

  void end_early(std::int64_t step, int signal) {
    report_.signal = signal;
    save(step);
    print_(fmt::format("stopped by {} after step {} of {}; {}", name_of_signal(signal), step,
                       o_.steps,
                       o_.save.empty()  ? "nothing is saved without --save"
                       : saved_ == step ? fmt::format("--resume '{}' goes on from there", o_.save)
                                        : what_is_saved()));
  }

  const RunOptions& o_;
  const bool listens_;
  Trainer& trainer_;
  RunReport& report_;
  RunLog& log_;
  const Print& print_;
  const std::int64_t tokens_before_;
  std::size_t logged_ = 0;  // number of steps logged
  double seconds_ = 0.0;    // sum over steps
  Stopwatch since_line_;
  std::int64_t saved_ = -1;  // the step in --save, if this run wrote it
  std::int64_t printed_steps_ = 0;
  double printed_seconds_ = 0.0;
  int noted_ = 0;  // the signal caught by any rank
};

}  // namespace

void run_steps(const RunOptions& options, bool listens, Trainer& trainer, RunReport& report,
               RunLog& log, const Print& print) {
  Loop(options, listens, trainer, report, log, print).run();
}

}  // namespace logitless::train
