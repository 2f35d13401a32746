// The controller of the far field: which steps are far-field ones, with which order and tau.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <future>
#include <sstream>

#include "core/check.h"
#include "head/far_field.h"
#include "head/order_file.h"
#include "head/validate.h"
#include "logitless/far_field.h"

namespace logitless {
namespace {

constexpr double kFirstTau = 0.003;
constexpr double kLeastTau = 0.0005;
constexpr double kMostTau = 0.01;
constexpr std::int64_t kMostInterval = 6400;
// Trials with one order, tau lowered from each to the next, before the far field is left alone.
constexpr int kTrials = 3;
// Of the average probabilities, what stays of the old ones when an order is made.
constexpr float kMemory = 0.5f;

// What an order is made from: copies, so that the step after may change the weights.
struct Snapshot {
  Buffer hidden, weight, bias;
  ConstTensorView hidden_view, weight_view, bias_view;
  std::vector<float> average;  // by word; of the last order, or empty
  float logit_scale = 1.0f, softcap = 0.0f, tau = 0.0f;
  bool moments = false;
};

Buffer copy_rows(const ConstTensorView& m, std::int64_t count, MemoryMeter* meter,
                 ConstTensorView& view) {
  const std::int64_t rows = m.size(0);
  const std::int64_t columns = m.rank() > 1 ? m.size(1) : 1;
  const auto element = static_cast<std::int64_t>(size_of(m.dtype()));
  Buffer out(static_cast<std::size_t>(count * columns * element), meter);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t from = i * rows / count * m.stride(0);
    std::byte* to = out.as<std::byte>() + i * columns * element;
    if (m.rank() == 1 || m.stride(1) == 1) {
      std::memcpy(to, static_cast<const std::byte*>(m.data()) + from * element,
                  static_cast<std::size_t>(columns * element));
      continue;
    }
    for (std::int64_t k = 0; k < columns; ++k) {
      std::memcpy(to + k * element,
                  static_cast<const std::byte*>(m.data()) + (from + k * m.stride(1)) * element,
                  static_cast<std::size_t>(element));
    }
  }
  const std::int64_t sizes[] = {count, columns};
  view = ConstTensorView(out.data(), m.dtype(), std::span(sizes, m.rank() == 1 ? 1 : 2));
  return out;
}

VocabOrder make_order(const Context& context, const Snapshot& s) {
  std::vector<float> average = average_probability(context, s.hidden_view, s.weight_view,
                                                   s.bias_view, s.logit_scale, s.softcap);
  for (std::size_t i = 0; i < s.average.size(); ++i)
    average[i] += kMemory * (s.average[i] - average[i]);
  for (float& p : average) p = std::isfinite(p) ? p : 0.0f;
  VocabOrder order = make_vocab_order(context, s.weight_view, average);
  return s.moments ? measure_tiles(context, order, s.hidden_view, s.weight_view, s.bias_view,
                                   s.logit_scale, s.tau)
                   : order;
}

void check(const FarFieldOptions& o) {
  require(o.accuracy == Accuracy::far_backward || o.accuracy == Accuracy::far_both,
          "accuracy: expected far_backward or far_both, got ", static_cast<int>(o.accuracy));
  require(o.error > 0.0 && o.error < 1.0, "error: expected a number in (0, 1), got ", o.error);
  for (const auto& [name, value, least] :
       {std::tuple{"audit_rows", o.audit_rows, std::int64_t{1}},
        std::tuple{"audit_every", o.audit_every, std::int64_t{1}},
        std::tuple{"refresh_every", o.refresh_every, std::int64_t{1}},
        std::tuple{"refresh_delay", o.refresh_delay, std::int64_t{0}},
        std::tuple{"sample_rows", o.sample_rows, std::int64_t{1}}}) {
    require(value >= least, name, ": expected ", least, " or more, got ", value);
  }
}

}  // namespace

struct FarFieldHead::State {
  State(const Context& c, const FarFieldOptions& o) : context(c), options(o) {
    report.tau = kFirstTau;
    interval = options.refresh_every;
    next_refresh = interval;
  }
  ~State() {
    if (making.valid()) making.wait();
  }

  // Plans of the current shape and features; remade when they, or tau, change.
  const LossPlan& plan_of(Accuracy accuracy, bool audit, const CrossEntropyOptions& o,
                          const CrossEntropyInputs& in, const CrossEntropyOutputs& out) {
    const HeadShape now = shape_of(in);
    const HeadFeatures wanted = features_of(o, in, out);
    const int slot = accuracy == Accuracy::exact ? 0 : audit ? 2 : 1;
    LossPlan& plan = plans[static_cast<std::size_t>(slot)];
    float& made_for = plan_tau[static_cast<std::size_t>(slot)];
    const float tau = slot == 0 ? 0.0f : static_cast<float>(report.tau);
    HeadShape fits = plan.shape;
    if (now.tokens <= fits.tokens) fits.tokens = now.tokens;
    if (!plan.kernel.empty() && fits == now && plan.features == wanted && made_for == tau)
      return plan;
    PlanRequest request;
    request.device = context.device();
    request.memory_budget = options.memory_budget;
    request.accuracy = accuracy;
    request.tau = tau;
    if (audit) request.audit_rows = options.audit_rows;
    plan = plan_cross_entropy(o, in, out, request);
    made_for = tau;
    context.trace(plan.explain());
    return plan;
  }
  const Workspace& workspace_for(const LossPlan& plan) {
    if (workspace == nullptr || workspace->bytes() < plan.workspace_bytes()) {
      workspace.reset();
      workspace = std::make_unique<Workspace>(context, plan);
    }
    return *workspace;
  }

  void start_order(const CrossEntropyOptions& o, const CrossEntropyInputs& in) {
    auto s = std::make_shared<Snapshot>();
    const RowMatrix m = as_rows("hidden", in.hidden);
    const std::int64_t sizes[] = {m.rows, m.columns};
    const std::int64_t strides[] = {m.row_stride, m.column_stride};
    const ConstTensorView rows(in.hidden.data(), in.hidden.dtype(), sizes, strides);
    MemoryMeter* meter = &context.memory();
    s->hidden = copy_rows(rows, std::min(m.rows, options.sample_rows), meter, s->hidden_view);
    s->logit_scale = o.logit_scale;
    s->softcap = o.softcap;
    s->tau = static_cast<float>(report.tau);
    s->moments = options.accuracy == Accuracy::far_both && o.softcap == 0.0f;
    if (order.vocab() == in.weight.size(0))
      s->average.assign(order.average().begin(), order.average().end());
    next_refresh = report.steps + interval;
    if (options.refresh_delay == 0) {
      s->weight_view = in.weight;
      s->bias_view = in.bias;
      pending = make_order(context, *s);
      takeover = report.steps;
      return;
    }
    s->weight = copy_rows(in.weight, in.weight.size(0), meter, s->weight_view);
    if (in.bias.defined()) s->bias = copy_rows(in.bias, in.bias.size(0), meter, s->bias_view);
    takeover = report.steps + options.refresh_delay;
    ContextOptions own;
    own.threads = 1;
    own.kernel = context.device().kernel;
    making = std::async(std::launch::async, [s, own] { return make_order(Context(own), *s); });
  }
  void wait_for_order() {
    if (making.valid()) pending = making.get();
  }

  // The error that the options bound, of an audited step.
  double error_of(const FarFieldStatistics& far) const {
    return options.accuracy == Accuracy::far_both
               ? std::max(far.audited_error, far.audited_lse_error)
               : far.audited_error;
  }

  // After an audited far-field step. Returns whether its gradients may stay.
  bool judge(double error, bool trial) {
    ++report.audits;
    report.last_error = error;
    if (error <= options.error) {
      report.far = true;
      wait = 0;
      if (trial) {
        trials = 0;
      } else if (error <= 0.5 * options.error && report.steps - order_step >= interval / 2) {
        interval = std::min(interval + interval / 2, kMostInterval);
      }
      if (error <= options.error / 3.0) report.tau = std::min(kMostTau, report.tau * 1.25);
      report.worst_kept_error = std::max(report.worst_kept_error, error);
      reason = "the last audit kept the error";
      return true;
    }
    report.far = false;
    if (!trial) {
      // The order has aged: a new one as soon as it can be made.
      interval = std::max<std::int64_t>(interval / 2, options.refresh_delay + 1);
      next_refresh = report.steps;
      reason = "an audit missed the error; a new order is due";
      return false;
    }
    if (++trials < kTrials && report.tau > kLeastTau) {
      report.tau =
          std::max(kLeastTau, report.tau * std::clamp(0.5 * options.error / error, 0.2, 0.6));
      try_again = true;
      reason = "a trial missed the error; another one with a smaller tau";
      return false;
    }
    leave("trials miss the error");
    return false;
  }
  // Dense for a while, longer each time.
  void leave(const char* why) {
    report.far = false;
    trials = 0;
    wait = std::min(kMostInterval, wait == 0 ? options.refresh_every : 2 * wait);
    next_refresh = report.steps + wait;
    reason = why;
  }

  const Context& context;
  FarFieldOptions options;
  FarFieldReport report;
  VocabOrder order, pending;
  std::future<VocabOrder> making;
  std::int64_t order_step = 0;  // the step whose weights the order is of
  std::int64_t takeover = -1;   // of the one pending; -1: none is
  std::int64_t interval = 0, next_refresh = 0, wait = 0, last_audit = 0;
  std::int64_t far_steps = 0;
  int trials = 0;
  bool try_again = false;
  std::string reason = "no order has been made";
  std::array<LossPlan, 3> plans;  // exact, far, far with an audit
  // The tau each was made for: where the planner takes an exact one, plan.tau does not say.
  std::array<float, 3> plan_tau = {};
  std::unique_ptr<Workspace> workspace;
};

FarFieldHead::FarFieldHead(const Context& context, const FarFieldOptions& options) {
  check(options);
  if (context.device().kind != DeviceKind::cpu)
    throw Unsupported("context: the far field has no kernel for GPUs");
  state_ = std::make_unique<State>(context, options);
}
FarFieldHead::~FarFieldHead() = default;
FarFieldHead::FarFieldHead(FarFieldHead&&) noexcept = default;
FarFieldHead& FarFieldHead::operator=(FarFieldHead&&) noexcept = default;

const FarFieldReport& FarFieldHead::report() const { return state_->report; }
const VocabOrder& FarFieldHead::order() const { return state_->order; }

LossStatistics FarFieldHead::step(const CrossEntropyOptions& options, const CrossEntropyInputs& in,
                                  const CrossEntropyOutputs& out) {
  State& s = *state_;
  require(out.d_hidden.defined(), "d_hidden: expected one, since audits measure its error");
  const auto dense = [&] {
    const LossPlan& plan = s.plan_of(Accuracy::exact, false, options, in, out);
    const LossStatistics stats =
        cross_entropy(s.context, plan, options, in, out, s.workspace_for(plan));
    ++s.report.dense_steps;
    return stats;
  };
  // Before anything is decided: a call that planning refuses leaves the state alone.
  const LossPlan& first = s.plan_of(s.options.accuracy, true, options, in, out);
  const bool worth = is_far(first.kind);
  ++s.report.steps;
  if (!worth) {
    if (s.try_again) {
      // The tau of the next trial would keep too much. From the first one again, with a new order.
      s.try_again = false;
      s.leave("a tau that might keep the error keeps too many tiles");
      s.report.tau = kFirstTau;
    } else {
      s.report.far = false;
      s.reason = first.explain();
    }
    return dense();
  }
  if (s.takeover < 0 && s.report.steps >= s.next_refresh) s.start_order(options, in);
  bool trial = s.try_again;
  s.try_again = false;
  if (s.takeover >= 0 && s.report.steps >= s.takeover) {
    s.wait_for_order();
    s.order = std::move(s.pending);
    s.pending = {};
    s.order_step = s.takeover - s.options.refresh_delay;
    s.trials = 0;
    s.takeover = -1;
    ++s.report.refreshes;
    trial = true;
  }
  if ((!trial && !s.report.far) || s.order.vocab() != in.weight.size(0)) return dense();

  const bool audit = trial || s.report.steps - s.last_audit >= s.options.audit_every;
  const LossPlan& plan = s.plan_of(s.options.accuracy, audit, options, in, out);
  CrossEntropyInputs far_in = in;
  far_in.order = s.order;
  const LossStatistics stats =
      cross_entropy(s.context, plan, options, far_in, out, s.workspace_for(plan));
  ++s.far_steps;
  s.report.mean_kept += (stats.far.kept - s.report.mean_kept) / static_cast<double>(s.far_steps);
  bool keep = true;
  if (audit && stats.far.audited_tokens > 0) {
    s.last_audit = s.report.steps;
    keep = s.judge(s.error_of(stats.far), trial);
  }
  if (keep && stats.far.dense_fallback) s.leave("more than two thirds of the tiles would be kept");
  if (keep || options.accumulate) return stats;
  ++s.report.repeated_steps;
  return dense();
}

std::string FarFieldHead::explain() const {
  const State& s = *state_;
  const FarFieldReport& r = s.report;
  std::ostringstream out;
  out << "next step: " << (r.far || s.try_again ? name_of(s.options.accuracy) : "dense") << ", "
      << s.reason << "\n"
      << "  " << r.steps << " steps, " << r.dense_steps << " dense (" << r.repeated_steps
      << " of them done again after an audit), " << r.refreshes << " orders, " << r.audits
      << " audits\n"
      << "  error wanted " << s.options.error << ", last " << r.last_error << ", worst kept "
      << r.worst_kept_error << "; tau " << r.tau << ", " << 100.0 * r.mean_kept
      << " % of the tiles kept on average\n";
  return std::move(out).str();
}

namespace {
// What the state is besides orders, in the order of the file.
constexpr int kCounts = 15;
constexpr int kNumbers = 4;
}  // namespace

void FarFieldHead::save(const std::string& path) const {
  State& s = *state_;
  s.wait_for_order();
  const FarFieldReport& r = s.report;
  const std::array<std::int64_t, kCounts> counts = {
      r.steps, r.dense_steps, r.repeated_steps, r.audits,   r.refreshes,
      r.far,   s.order_step,  s.takeover,       s.interval, s.next_refresh,
      s.wait,  s.last_audit,  s.far_steps,      s.trials,   s.try_again};
  const std::array<double, kNumbers> numbers = {r.last_error, r.worst_kept_error, r.tau,
                                                r.mean_kept};
  std::vector<NamedTensor> tensors = {{"counts", {counts.data(), DType::i64, {kCounts}}},
                                      {"numbers", {numbers.data(), DType::f64, {kNumbers}}}};
  if (!s.order.empty()) append_order(s.order, "order.", tensors);
  if (!s.pending.empty()) append_order(s.pending, "pending.", tensors);
  write_safetensors(path, tensors,
                    {{"kind", "logitless far field"},
                     {"accuracy", std::string(name_of(s.options.accuracy))},
                     {"reason", s.reason}});
}

void FarFieldHead::load(const std::string& path) {
  const TensorFile file(path);
  const auto& metadata = file.metadata();
  const auto kind = metadata.find("kind");
  require(kind != metadata.end() && kind->second == "logitless far field", path,
          ": expected the state of a FarFieldHead");
  State& now = *state_;
  const auto accuracy = metadata.find("accuracy");
  require(accuracy != metadata.end() && accuracy->second == name_of(now.options.accuracy), path,
          ": saved with accuracy ", accuracy == metadata.end() ? "none" : accuracy->second,
          ", this head has ", name_of(now.options.accuracy));
  const ConstTensorView counts = file.tensor("counts");
  const ConstTensorView numbers = file.tensor("numbers");
  require(counts.dtype() == DType::i64 && counts.numel() == kCounts, path,
          ": counts: expected i64[", kCounts, "], got ", describe(counts));
  require(numbers.dtype() == DType::f64 && numbers.numel() == kNumbers, path,
          ": numbers: expected f64[", kNumbers, "], got ", describe(numbers));
  auto next = std::make_unique<State>(now.context, now.options);
  State& s = *next;
  FarFieldReport& r = s.report;
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
  s.order_step = c[6];
  s.takeover = c[7];
  s.interval = c[8];
  s.next_refresh = c[9];
  s.wait = c[10];
  s.last_audit = c[11];
  s.far_steps = c[12];
  s.trials = static_cast<int>(c[13]);
  s.try_again = c[14] != 0;
  r.last_error = n[0];
  r.worst_kept_error = n[1];
  r.tau = n[2];
  r.mean_kept = n[3];
  require(r.tau >= kLeastTau && r.tau <= kMostTau && s.interval >= 1, path,
          ": numbers: no state of a FarFieldHead");
  if (file.contains("order.words")) s.order = order_of(file, path, "order.");
  if (file.contains("pending.words")) s.pending = order_of(file, path, "pending.");
  require((s.takeover >= 0) == !s.pending.empty(), path, ": pending order: expected ",
          s.takeover >= 0 ? "one" : "none");
  const auto reason = metadata.find("reason");
  if (reason != metadata.end()) s.reason = reason->second;
  state_ = std::move(next);
}

}  // namespace logitless
