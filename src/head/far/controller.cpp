#include "head/far/controller.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iomanip>
#include <limits>
#include <memory>
#include <sstream>
#include <tuple>

#include "core/check.h"
#include "head/far/replicas.h"
#include "head/far/shared_order.h"
#include "head/plan/far_forecast.h"
#include "kernels/device/order.h"

namespace logitless {
namespace {

// Largest interval in steps between orders, unless the options begin with a larger one.
constexpr std::int64_t kMostInterval = 6400;
// Limit of every option that counts, so that sums with the steps of a run fit in 64 bits.
constexpr std::int64_t kMostOption = INT64_C(1) << 40;
// Factors on tau after an audit with at most a third of the allowed error: kFirstRise before any
// audit has missed, kRise after the first miss. Successive audits vary widely. In a training run
// whose tau rose by a quarter until a miss, one audit in ten missed (far_field_figures.md).
constexpr double kFirstRise = 1.25;
constexpr double kRise = 1.05;
// Factor on tau after a miss that is no trial, or is the first with an order that followed accepted
// ones. One token that is wholly wrong makes an audit of 128 miss by 9 % with any tau
// (docs/develop/log/far_field_figures.md).
constexpr double kFall = 0.7;
// A token is wholly wrong with any tau of far_both if its likely entry is unlikely for all tokens
// of the order's sample (docs/develop/log/far_field_figures.md#a-wider-head). If more than
// kMostMissed of the audits miss, averaged over about kBothAudits, steps change to far_backward,
// whose masses are exact.
constexpr double kBothAudits = 8.0;
constexpr double kMostMissed = 0.4;
constexpr double kFewMissed = 0.2;  // far_both serves these tokens again

void check(const FarFieldOptions& o) {
  require(o.accuracy == Accuracy::far_backward || o.accuracy == Accuracy::far_both,
          "accuracy: expected far_backward or far_both, got ", static_cast<int>(o.accuracy));
  require(o.error > 0.0 && o.error < 1.0, "error: expected a number in (0, 1), got ", o.error);
  for (const auto& [name, value, least] :
       {std::tuple{"sample_every", o.sample_every, std::int64_t{0}},
        std::tuple{"audit_rows", o.audit_rows, std::int64_t{1}},
        std::tuple{"audit_every", o.audit_every, std::int64_t{1}},
        std::tuple{"refresh_every", o.refresh_every, std::int64_t{1}},
        std::tuple{"refresh_delay", o.refresh_delay, std::int64_t{0}},
        std::tuple{"sample_rows", o.sample_rows, std::int64_t{1}}}) {
    require(value >= least && value <= kMostOption, name, ": expected ", least, " to ", kMostOption,
            ", got ", value);
  }
}

}  // namespace

FarController::FarController(const Context& context, const FarFieldOptions& options)
    : context_(context), options_(options) {
  check(options);
  if (on_gpu() && options.accuracy == Accuracy::far_both) {
    const std::string missing = cuda::moments_unsupported();
    if (!missing.empty()) throw Unsupported(concat("accuracy: far_both: ", missing));
  }
  s_.report.tau = s_.other_tau = kFirstTau;
  s_.interval = options.refresh_every;
  s_.next_refresh = s_.interval;
}

PlanRequest FarController::request(const FarStep& step) const {
  PlanRequest request;
  request.device = context_.device();
  request.memory_budget = options_.memory_budget;
  if (!step.far) return request;
  request.accuracy = accuracy();
  // Ranks decide together with an order whether to use the far field, independent of the tokens
  // that each has in this step.
  if (settled()) {
    const VocabOrder& order = s_.order.empty() ? s_.pending : s_.order;
    const bool both = request.accuracy == Accuracy::far_both && order.has_moments();
    request.kind = both ? PlanKind::far_both : PlanKind::far_backward;
  }
  request.tau = static_cast<float>(s_.report.tau);
  request.sample_every = options_.sample_every;
  if (step.audit) request.audit_rows = options_.audit_rows;
  return request;
}

FarStep FarController::begin(const LossPlan& audited, const OrderSource& source) {
  ++s_.report.steps;
  const bool far = settled() || is_far(audited.kind);
  if (!far && options_.replicas == nullptr) {
    if (s_.backward && s_.report.steps >= s_.retry_both && source.hidden.numel() > 0) {
      go_both_ways();  // far_backward does not pay off here
      s_.report.far = s_.trial_due = false;
      if (s_.takeover >= 0 && s_.takeover <= s_.report.steps) {  // of an old step
        s_.pending = {};
        s_.takeover = -1;
      }
      if (s_.takeover < 0) s_.next_refresh = s_.report.steps;
    } else if ((s_.trial_due && s_.trials > 0) || s_.report.tau < kFirstTau) {
      // This tau would select too many tiles. A new order starts from the first tau.
      leave("a tau that might keep the error keeps too many tiles");
      s_.report.tau = kFirstTau;
    } else {
      s_.report.far = false;
      s_.reason = audited.explain();
    }
    ++s_.report.dense_steps;
    return {};
  }
  if (s_.takeover < 0 && s_.report.steps >= s_.next_refresh) start_order(source, far);
  bool trial = s_.trial_due;
  s_.trial_due = false;
  if (s_.takeover >= 0 && s_.report.steps >= s_.takeover) {
    take_over();
    trial = true;
  }
  if ((!trial && !s_.report.far) || s_.order.vocab() != source.weight.size(0)) {
    ++s_.report.dense_steps;
    return {};
  }
  if (s_.backward) ++s_.backward_steps;
  const bool audit = trial || s_.report.steps - s_.last_audit >= options_.audit_every;
  return {true, audit, trial, goes_both(audited)};
}

// Returns whether the step's plan is far_both: replicas decide that together with an order.
bool FarController::goes_both(const LossPlan& audited) const {
  return (settled() ? request({.far = true}).kind : audited.kind) == PlanKind::far_both;
}

bool FarController::accept(const FarStep& step, const FarFieldStatistics& found, bool may_repeat) {
  const FarFieldStatistics far =
      options_.replicas == nullptr
          ? found
          : far_statistics_of_replicas(*options_.replicas, common(), found);
  const bool backward = s_.backward;
  ++s_.far_steps;
  s_.report.mean_selected +=
      (far.selected - s_.report.mean_selected) / static_cast<double>(s_.far_steps);
  bool keep = true;
  // Without tokens, or with gradients of 0 (weights of 0), an audit measures nothing.
  const double error = far.audited_tokens > 0 ? error_of(far) : 0.0;
  if (step.audit && error != 0.0) {
    s_.last_audit = s_.report.steps;
    keep = judge(error, step, far.dense_fallback);
    if (keep || !may_repeat) keep_worst(error);
  } else if (step.trial) {
    s_.trial_due = true;
    s_.reason = "a trial had no gradient to judge by";
  }
  if (keep && far.dense_fallback) leave("more than two thirds of the tiles would be kept");
  if (keep || !may_repeat) return true;
  ++s_.report.repeated_steps;
  ++s_.report.dense_steps;
  if (backward) --s_.backward_steps;
  return false;
}

void FarController::keep_worst(double error) {
  if (std::isnan(error)) error = std::numeric_limits<double>::infinity();
  s_.report.worst_accepted_error = std::max(s_.report.worst_accepted_error, error);
}

FarDecisions FarController::before_step() {
  if (s_.takeover >= 0 && s_.report.steps + 1 >= s_.takeover) wait_for_order();
  return s_;
}

void FarController::withdraw(FarDecisions before) {
  if (before.takeover < 0) making_ = {};
  s_ = std::move(before);
}

std::vector<std::pair<std::string, std::string>> FarController::common() const {
  const FarFieldOptions& o = options_;
  const auto text = [](const auto& values) {
    std::string out;
    for (const auto& value : values) out += concat(out.empty() ? "" : " ", value);
    return out;
  };
  const std::array<std::int64_t, 6> of_options = {o.sample_every,  o.audit_rows,    o.audit_every,
                                                  o.refresh_every, o.refresh_delay, o.sample_rows};
  return {{"accuracy", std::string(name_of(o.accuracy))},
          {"error", concat(o.error)},
          {"sample_every, audit_rows, audit_every, refresh_every, refresh_delay, sample_rows",
           text(of_options)},
          {"steps of the FarFieldHead", concat(s_.report.steps)},
          {"counts of its state", text(counts())},
          {"numbers of its state", text(numbers())}};
}

bool FarController::has_layout(const std::string& layout) const {
  return s_.layout == layout || (s_.order.empty() && s_.takeover < 0);
}

void FarController::set_layout(const std::string& layout, bool same) {
  s_.layout = layout;
  if (same) return;
  making_ = {};
  s_.order = s_.pending = {};
  s_.takeover = -1;
  s_.making_vocab = 0;
  s_.report.far = s_.trial_due = false;
  s_.next_refresh = s_.report.steps;
  s_.reason = "the order was of another sharding of the vocabulary; a new one is due";
}

// Takes the sample that an order is made from. `copy`: the source will not outlive the call.
OrderSample FarController::look(const OrderSource& source, bool copy) const {
  OrderSample s = source.sharding.vocab_group != nullptr
                      ? sample_of_ranks(context_, source, options_.sample_rows)
                  : on_gpu() ? look_at(source, options_.sample_rows)
                             : sample_of(source, options_.sample_rows, copy, &context_.memory());
  s.tau = static_cast<float>(s_.report.tau);
  s.moments = options_.accuracy == Accuracy::far_both && source.softcap == 0.0f;
  if (s_.order.vocab() == source.weight.size(0))
    s.average.assign(s_.order.average().begin(), s_.order.average().end());
  return s;
}

bool FarController::settled() const {
  return options_.replicas != nullptr && !(s_.order.empty() && s_.pending.empty());
}

// `far`: the planner would choose the far field for these tokens.
void FarController::start_order(const OrderSource& source, bool far) {
  // A step without tokens starts no order; the next step with tokens does.
  const bool tokens = source.hidden.numel() > 0 || source.tokens_elsewhere;
  if (!tokens && options_.replicas == nullptr) return;
  if (options_.replicas != nullptr) {
    ReplicasOrder found = order_of_replicas(*options_.replicas, common(), tokens, far, [&] {
      return make_order(context_, look(source, /*copy=*/false));
    });
    if (!found.tokens) return;
    if (found.order.empty()) return leave("for the tokens of a rank exact plans are faster");
    s_.pending = std::move(found.order);
  } else if (source.sharding.vocab_group != nullptr) {
    s_.pending = make_shared_order(context_, look(source, /*copy=*/false));
  } else if (options_.refresh_delay == 0 || on_gpu()) {
    s_.pending = make_order(context_, look(source, /*copy=*/false));
  } else {
    auto s = std::make_shared<OrderSample>(look(source, /*copy=*/true));
    ContextOptions own;
    own.threads = 1;
    own.kernel = context_.device().kernel;
    making_ = std::async(std::launch::async, [s, own] { return make_order(Context(own), *s); });
  }
  // Nothing above has thrown, so an order is being made.
  s_.next_refresh = s_.report.steps + s_.interval;
  s_.takeover = s_.report.steps + options_.refresh_delay;
  s_.making_vocab = source.weight.size(0);
}

void FarController::take_over() {
  wait_for_order();
  s_.order = std::move(s_.pending);
  s_.pending = {};
  s_.order_step = s_.takeover - options_.refresh_delay;
  s_.trials = 0;
  s_.takeover = -1;
  ++s_.report.refreshes;
}

// If making the order fails, there is none, and the next step starts another.
void FarController::wait_for_order() {
  if (!making_.valid()) return;
  try {
    s_.pending = making_.get();
  } catch (...) {
    s_.takeover = -1;
    s_.next_refresh = s_.report.steps;
    throw;
  }
}

// Accuracy of the next far-field step.
Accuracy FarController::accuracy() const {
  return s_.backward ? Accuracy::far_backward : options_.accuracy;
}

// Returns the error of an audited step that the options bound. NaN if either error is NaN.
double FarController::error_of(const FarFieldStatistics& far) const {
  const double gradients = far.audited_error, lse = far.audited_lse_error;
  if (accuracy() != Accuracy::far_both || std::isnan(gradients)) return gradients;
  return gradients > lse ? gradients : lse;
}

// Judges an audited far-field step. Returns whether its gradients may be used. `fallback`: all
// tiles were selected, since nearly all would have been.
bool FarController::judge(double error, const FarStep& step, bool fallback) {
  ++s_.report.audits;
  s_.report.last_error = error;
  const bool keeps = error <= options_.error;
  const bool trial = step.trial;
  if (step.both && !fallback) note_both(!keeps);
  if (keeps) {
    s_.report.far = true;
    s_.wait = 0;
    if (trial) {
      s_.trials = 0;
    } else if (error <= 0.5 * options_.error &&
               s_.report.steps - s_.order_step >= s_.interval / 2) {
      s_.interval = std::min(s_.interval + s_.interval / 2, most_interval());
    }
    if (error <= options_.error / 3.0) {
      const double rise = s_.misses == 0 ? kFirstRise : kRise;
      s_.report.tau = std::min(kMostTau, s_.report.tau * rise);
    }
    s_.reason = "the last audit kept the error";
    if (trial && !fallback && s_.backward && s_.report.steps >= s_.retry_both) {
      go_both_ways();
      s_.trial_due = true;
    }
    return true;
  }
  return judge_miss(error, step);
}

// Records whether an audit of far_both missed.
void FarController::note_both(bool missed) {
  s_.both_missed += ((missed ? 1.0 : 0.0) - s_.both_missed) / kBothAudits;
  if (!missed && s_.both_missed < kFewMissed) s_.both_wait = 0;
}

bool FarController::judge_miss(double error, const FarStep& step) {
  s_.report.far = false;
  ++s_.misses;
  if (step.both && s_.both_missed > kMostMissed) {
    if (!step.trial) s_.next_refresh = s_.report.steps;  // the order may have aged, too
    go_backward();
    return false;
  }
  if (!step.trial) {
    // The order may have aged, so a new one is due as soon as possible. Or tau was too large.
    s_.report.tau = std::max(kLeastTau, s_.report.tau * kFall);
    s_.interval = std::max<std::int64_t>(s_.interval / 2, options_.refresh_delay + 1);
    s_.next_refresh = s_.report.steps;
    s_.reason = "an audit missed the error; a new order is due";
    return false;
  }
  if (++s_.trials < kTrials && s_.report.tau > kLeastTau) {
    const bool has_accepted = s_.report.audits > s_.misses;
    const double fall =
        has_accepted && s_.trials == 1 ? kFall : std::clamp(0.5 * options_.error / error, 0.2, 0.6);
    s_.report.tau = std::max(kLeastTau, s_.report.tau * fall);
    s_.trial_due = true;
    s_.reason = "a trial missed the error; another one with a smaller tau";
    return false;
  }
  step.both ? go_backward() : leave("trials miss the error");
  return false;
}

// Changes to far_backward and makes a trial with the current order. far_both is tried again with a
// later order, after a delay that doubles each time. Each kind has its own tau. The interval
// between orders, which misses of far_both have shortened, is reset.
void FarController::go_backward() {
  s_.backward = true;
  std::swap(s_.report.tau, s_.other_tau);
  s_.interval = std::max(s_.interval, options_.refresh_every);
  s_.both_wait =
      std::min(most_interval(), s_.both_wait == 0 ? options_.refresh_every : 2 * s_.both_wait);
  s_.retry_both = s_.report.steps + s_.both_wait;
  s_.trials = 0;
  s_.trial_due = true;
  s_.reason = "both ways miss the error; a trial backward alone";
}

// Changes back to far_both, with at least the first tau: trials may have lowered its own in vain.
void FarController::go_both_ways() {
  s_.backward = false;
  std::swap(s_.report.tau, s_.other_tau);
  s_.report.tau = std::max(s_.report.tau, kFirstTau);
  s_.trials = 0;
  s_.reason = "both ways are tried again";
}

std::int64_t FarController::most_interval() const {
  return std::max(kMostInterval, options_.refresh_every);
}

// Suspends the far field, each time for longer.
void FarController::leave(const char* why) {
  s_.report.far = s_.trial_due = false;
  s_.trials = 0;
  s_.wait = std::min(most_interval(), s_.wait == 0 ? options_.refresh_every : 2 * s_.wait);
  s_.next_refresh = s_.report.steps + s_.wait;
  s_.reason = why;
}

std::string FarController::explain() const {
  const FarFieldReport& r = s_.report;
  std::ostringstream out;
  out << std::setprecision(3);  // further digits vary from step to step without meaning
  out << "next step: " << (r.far || s_.trial_due ? name_of(accuracy()) : "dense") << ", "
      << s_.reason << "\n"
      << "  " << r.steps << " steps, " << r.dense_steps << " dense (" << r.repeated_steps
      << " of them done again after an audit), " << r.refreshes << " orders, " << r.audits
      << " audits\n";
  if (s_.backward_steps > 0)
    out << "  " << s_.backward_steps << " steps backward alone, where both ways missed the error\n";
  out << "  error wanted " << options_.error;
  if (r.audits > 0)
    out << ", last " << r.last_error << ", worst accepted " << r.worst_accepted_error;
  out << "; tau " << r.tau << ", " << 100.0 * r.mean_selected
      << " % of the tiles selected on average\n";
  return std::move(out).str();
}

void FarController::require_head(std::int64_t vocab, std::int64_t dim) const {
  for (const std::int64_t vocab_count :
       {s_.order.vocab(), s_.takeover >= 0 ? s_.making_vocab : 0}) {
    require(vocab_count == 0 || vocab_count == vocab, "weight: expected ", vocab_count,
            " vocabulary entries, of which the order of this far field is, got ", vocab);
  }
  for (const std::int64_t of : {s_.order.dim(), s_.pending.dim()}) {
    require(of == 0 || of == dim, "hidden: expected dim ", of,
            ", of which the moments of this far field's order are, got ", dim);
  }
}

}  // namespace logitless
