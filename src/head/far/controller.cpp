#include "head/far/controller.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <iomanip>
#include <map>
#include <memory>
#include <sstream>
#include <tuple>

#include "core/check.h"
#include "core/safetensors.h"
#include "head/far/order_file.h"
#include "head/plan/far_forecast.h"
#include "kernels/device_order.h"

namespace logitless {
namespace {

constexpr double kFirstTau = 0.003;
constexpr double kLeastTau = 0.0005;
constexpr double kMostTau = 0.01;
constexpr std::int64_t kMostInterval = 6400;
// Trials with one order, tau lowered from each to the next, before the far field is left alone.
constexpr int kTrials = 3;

// What the state is besides orders, in the order of the file.
constexpr int kCounts = 15;
constexpr int kNumbers = 4;

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
    require(value >= least, name, ": expected ", least, " or more, got ", value);
  }
}

}  // namespace

FarController::FarController(const Context& context, const FarFieldOptions& options)
    : context_(&context), options_(options) {
  check(options);
  if (on_gpu() && options.accuracy == Accuracy::far_both) {
    const std::string missing = cuda::moments_unsupported();
    if (!missing.empty()) throw Unsupported(concat("accuracy: far_both: ", missing));
  }
  report_.tau = kFirstTau;
  interval_ = options.refresh_every;
  next_refresh_ = interval_;
}

PlanRequest FarController::request(const FarStep& step) const {
  PlanRequest request;
  request.device = context_->device();
  request.memory_budget = options_.memory_budget;
  if (!step.far) return request;
  request.accuracy = options_.accuracy;
  request.tau = static_cast<float>(report_.tau);
  request.sample_every = options_.sample_every;
  if (step.audit) request.audit_rows = options_.audit_rows;
  return request;
}

FarStep FarController::begin(const LossPlan& audited, const OrderSource& source) {
  ++report_.steps;
  if (!is_far(audited.kind)) {
    if (try_again_) {
      // The tau of the next trial would keep too much. From the first one again, with a new order.
      try_again_ = false;
      leave("a tau that might keep the error keeps too many tiles");
      report_.tau = kFirstTau;
    } else {
      report_.far = false;
      reason_ = audited.explain();
    }
    ++report_.dense_steps;
    return {};
  }
  // Not from a step without tokens: the next one that has some will do.
  if (takeover_ < 0 && report_.steps >= next_refresh_ && source.hidden.numel() > 0)
    start_order(source);
  bool trial = try_again_;
  try_again_ = false;
  if (takeover_ >= 0 && report_.steps >= takeover_) {
    wait_for_order();
    order_ = std::move(pending_);
    pending_ = {};
    order_step_ = takeover_ - options_.refresh_delay;
    trials_ = 0;
    takeover_ = -1;
    ++report_.refreshes;
    trial = true;
  }
  if ((!trial && !report_.far) || order_.vocab() != source.weight.size(0)) {
    ++report_.dense_steps;
    return {};
  }
  return {true, trial || report_.steps - last_audit_ >= options_.audit_every, trial};
}

bool FarController::accept(const FarStep& step, const FarFieldStatistics& far, bool may_repeat) {
  ++far_steps_;
  report_.mean_kept += (far.kept - report_.mean_kept) / static_cast<double>(far_steps_);
  bool keep = true;
  if (step.audit && far.audited_tokens > 0) {
    last_audit_ = report_.steps;
    keep = judge(error_of(far), step.trial);
  }
  if (keep && far.dense_fallback) leave("more than two thirds of the tiles would be kept");
  if (keep || !may_repeat) return true;
  ++report_.repeated_steps;
  ++report_.dense_steps;
  return false;
}

void FarController::start_order(const OrderSource& source) {
  const bool at_once = options_.refresh_delay == 0 || on_gpu();
  auto s = std::make_shared<OrderSample>(
      on_gpu() ? look_at(source, options_.sample_rows)
               : sample_of(source, options_.sample_rows, !at_once, &context_->memory()));
  s->tau = static_cast<float>(report_.tau);
  s->moments = options_.accuracy == Accuracy::far_both && source.softcap == 0.0f;
  if (order_.vocab() == source.weight.size(0))
    s->average.assign(order_.average().begin(), order_.average().end());
  next_refresh_ = report_.steps + interval_;
  takeover_ = report_.steps + options_.refresh_delay;
  making_vocab_ = source.weight.size(0);
  if (at_once) {
    pending_ = make_order(*context_, *s);
    return;
  }
  ContextOptions own;
  own.threads = 1;
  own.kernel = context_->device().kernel;
  making_ = std::async(std::launch::async, [s, own] { return make_order(Context(own), *s); });
}

void FarController::wait_for_order() {
  if (making_.valid()) pending_ = making_.get();
}

// The error that the options bound, of an audited step.
double FarController::error_of(const FarFieldStatistics& far) const {
  return options_.accuracy == Accuracy::far_both
             ? std::max(far.audited_error, far.audited_lse_error)
             : far.audited_error;
}

// After an audited far-field step. Returns whether its gradients may stay.
bool FarController::judge(double error, bool trial) {
  ++report_.audits;
  report_.last_error = error;
  if (error <= options_.error) {
    report_.far = true;
    wait_ = 0;
    if (trial) {
      trials_ = 0;
    } else if (error <= 0.5 * options_.error && report_.steps - order_step_ >= interval_ / 2) {
      interval_ = std::min(interval_ + interval_ / 2, kMostInterval);
    }
    if (error <= options_.error / 3.0) report_.tau = std::min(kMostTau, report_.tau * 1.25);
    report_.worst_kept_error = std::max(report_.worst_kept_error, error);
    reason_ = "the last audit kept the error";
    return true;
  }
  report_.far = false;
  if (!trial) {
    // The order has aged: a new one as soon as it can be made.
    interval_ = std::max<std::int64_t>(interval_ / 2, options_.refresh_delay + 1);
    next_refresh_ = report_.steps;
    reason_ = "an audit missed the error; a new order is due";
    return false;
  }
  if (++trials_ < kTrials && report_.tau > kLeastTau) {
    report_.tau =
        std::max(kLeastTau, report_.tau * std::clamp(0.5 * options_.error / error, 0.2, 0.6));
    try_again_ = true;
    reason_ = "a trial missed the error; another one with a smaller tau";
    return false;
  }
  leave("trials miss the error");
  return false;
}

// Dense for a while, longer each time.
void FarController::leave(const char* why) {
  report_.far = false;
  trials_ = 0;
  wait_ = std::min(kMostInterval, wait_ == 0 ? options_.refresh_every : 2 * wait_);
  next_refresh_ = report_.steps + wait_;
  reason_ = why;
}

std::string FarController::explain() const {
  const FarFieldReport& r = report_;
  std::ostringstream out;
  out << std::setprecision(3);  // what varies from step to step beyond these digits says nothing
  out << "next step: " << (r.far || try_again_ ? name_of(options_.accuracy) : "dense") << ", "
      << reason_ << "\n"
      << "  " << r.steps << " steps, " << r.dense_steps << " dense (" << r.repeated_steps
      << " of them done again after an audit), " << r.refreshes << " orders, " << r.audits
      << " audits\n"
      << "  error wanted " << options_.error;
  if (r.audits > 0) out << ", last " << r.last_error << ", worst kept " << r.worst_kept_error;
  out << "; tau " << r.tau << ", " << 100.0 * r.mean_kept << " % of the tiles kept on average\n";
  return std::move(out).str();
}

// `write(tensors, metadata)` of the state.
template <typename Write>
void FarController::write(Write&& write) {
  wait_for_order();
  const FarFieldReport& r = report_;
  const std::array<std::int64_t, kCounts> counts = {
      r.steps, r.dense_steps, r.repeated_steps, r.audits,  r.refreshes,
      r.far,   order_step_,   takeover_,        interval_, next_refresh_,
      wait_,   last_audit_,   far_steps_,       trials_,   try_again_};
  const std::array<double, kNumbers> numbers = {r.last_error, r.worst_kept_error, r.tau,
                                                r.mean_kept};
  std::vector<NamedTensor> tensors = {{"counts", {counts.data(), DType::i64, {kCounts}}},
                                      {"numbers", {numbers.data(), DType::f64, {kNumbers}}}};
  if (!order_.empty()) append_order(order_, "order.", tensors);
  if (!pending_.empty()) append_order(pending_, "pending.", tensors);
  write(tensors,
        std::map<std::string, std::string>{{"kind", "logitless far field"},
                                           {"accuracy", std::string(name_of(options_.accuracy))},
                                           {"reason", reason_}});
}

void FarController::save(const std::string& path) {
  write([&](const auto& tensors, const auto& metadata) {
    write_safetensors(path, tensors, metadata);
  });
}

std::vector<std::byte> FarController::state() {
  std::vector<std::byte> made;
  write([&](const auto& tensors, const auto& metadata) {
    made = safetensors_bytes(tensors, metadata);
  });
  return made;
}

void FarController::load(const std::string& path) { read(TensorFile(path), path); }

void FarController::set_state(std::span<const std::byte> state) {
  read(TensorFile(state, "state"), "state");
}

void FarController::require_head(std::int64_t vocab, std::int64_t dim) const {
  for (const std::int64_t words : {order_.vocab(), takeover_ >= 0 ? making_vocab_ : 0}) {
    require(words == 0 || words == vocab, "weight: expected ", words,
            " words, of which the order of this far field is, got ", vocab);
  }
  for (const std::int64_t of : {order_.dim(), pending_.dim()}) {
    require(of == 0 || of == dim, "hidden: expected dim ", of,
            ", of which the moments of this far field's order are, got ", dim);
  }
}

void FarController::read(const TensorFile& file, const std::string& path) {
  const auto& metadata = file.metadata();
  const auto kind = metadata.find("kind");
  require(kind != metadata.end() && kind->second == "logitless far field", path,
          ": expected the state of a FarFieldHead");
  const auto accuracy = metadata.find("accuracy");
  require(accuracy != metadata.end() && accuracy->second == name_of(options_.accuracy), path,
          ": saved with accuracy ", accuracy == metadata.end() ? "none" : accuracy->second,
          ", this head has ", name_of(options_.accuracy));
  const ConstTensorView counts = file.tensor("counts");
  const ConstTensorView numbers = file.tensor("numbers");
  require(counts.dtype() == DType::i64 && counts.numel() == kCounts, path,
          ": counts: expected i64[", kCounts, "], got ", describe(counts));
  require(numbers.dtype() == DType::f64 && numbers.numel() == kNumbers, path,
          ": numbers: expected f64[", kNumbers, "], got ", describe(numbers));
  FarController s(*context_, options_);
  FarFieldReport& r = s.report_;
  std::array<std::int64_t, kCounts> c;
  std::memcpy(c.data(), counts.data(), sizeof(c));
  std::array<double, kNumbers> n;
  std::memcpy(n.data(), numbers.data(), sizeof(n));
  r.steps = c[0];
  r.dense_steps = c[1];
  r.repeated_steps = c[2];
  r.audits = c[3];
  r.refreshes = c[4];
  r.far = c[5] != 0;
  s.order_step_ = c[6];
  s.takeover_ = c[7];
  s.interval_ = c[8];
  s.next_refresh_ = c[9];
  s.wait_ = c[10];
  s.last_audit_ = c[11];
  s.far_steps_ = c[12];
  s.trials_ = static_cast<int>(c[13]);
  s.try_again_ = c[14] != 0;
  r.last_error = n[0];
  r.worst_kept_error = n[1];
  r.tau = n[2];
  r.mean_kept = n[3];
  // Sums of these and of what options allow stay within 64 bits.
  constexpr std::int64_t kMostCount = INT64_C(1) << 60;
  const bool counts_hold = std::all_of(c.begin(), c.end(), [](std::int64_t count) {
    return count >= -kMostCount && count <= kMostCount;
  });
  require(counts_hold && s.interval_ >= 1 && s.wait_ >= 0 && s.wait_ <= kMostInterval &&
              c[13] >= 0 && c[13] <= kTrials && r.dense_steps >= 0 && r.steps >= r.dense_steps &&
              r.repeated_steps >= 0 && r.audits >= 0 && r.refreshes >= 0 && s.last_audit_ >= 0 &&
              s.far_steps_ >= 0,
          path, ": counts: no state of a FarFieldHead");
  require(r.tau >= kLeastTau && r.tau <= kMostTau && r.mean_kept >= 0.0 && r.mean_kept <= 1.0 &&
              r.worst_kept_error >= 0.0 && r.worst_kept_error < 1.0,
          path, ": numbers: no state of a FarFieldHead");
  if (file.contains("order.words")) s.order_ = order_of(file, path, "order.");
  if (file.contains("pending.words")) s.pending_ = order_of(file, path, "pending.");
  s.making_vocab_ = s.pending_.vocab();
  require((s.takeover_ >= 0) == !s.pending_.empty(), path, ": pending order: expected ",
          s.takeover_ >= 0 ? "one" : "none");
  const auto reason = metadata.find("reason");
  if (reason != metadata.end()) s.reason_ = reason->second;
  *this = std::move(s);
}

}  // namespace logitless
