// The decisions of FarFieldHead (docs/use/far_field.md), made from the statistics of its steps:
// which steps use the far field, with which order and tau. It neither plans nor computes a step.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <future>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "head/far/order_sample.h"
#include "logitless/far_field.h"
#include "logitless/tensor_file.h"

namespace logitless {

struct FarStep {
  bool far = false;    // else dense
  bool audit = false;  // measure the error of this far-field step
  bool trial = false;  // audited step that tries an order or a tau
  bool both = false;   // its plan is far_both
};

// All findings and decisions of a controller as plain values, so that a failed step can be undone.
struct FarDecisions {
  FarFieldReport report;
  VocabOrder order, pending;
  std::int64_t making_vocab = 0;  // vocabulary of the order that is being made or pending
  std::int64_t order_step = 0;    // step whose weights the order was made from
  std::int64_t takeover = -1;     // step at which the pending order takes over; -1: none
  std::int64_t interval = 0, next_refresh = 0, wait = 0, last_audit = 0;
  std::int64_t far_steps = 0;
  int trials = 0;           // with the current order, that missed the error
  std::int64_t misses = 0;  // audits that missed the error
  bool trial_due = false;
  // With far_both: whether steps have changed to far_backward after misses. From step retry_both
  // on, an accepted trial of an order changes back; both_wait is the delay until then.
  bool backward = false;
  std::int64_t retry_both = 0, both_wait = 0;
  std::int64_t backward_steps = 0;
  double both_missed = 0.0;  // moving average of misses over audits of far_both
  double other_tau = 0.0;    // tau of the kind that is not in use; report.tau is that of the other
  std::string reason = "no order has been made";
  std::string layout;  // description of the vocabulary shard of the orders; empty without sharding
};

// A state without its orders, which are most of it and change seldom.
struct StateOutline {
  std::vector<std::byte> front;  // all bytes before the orders
  std::size_t bytes = 0;         // of the whole state
  std::string orders;            // a name of the orders' contents
};

// A step is begin(), the computation that it requests and, if that is far, accept().
// take_far_step() calls them in this order and withdraws a step that throws.
class FarController {
 public:
  // See FarFieldHead. Copies the context, including its memory meter.
  FarController(const Context& context, const FarFieldOptions& options);

  const Context& context() const { return context_; }
  const FarFieldOptions& options() const { return options_; }
  const FarFieldReport& report() const { return s_.report; }
  const VocabOrder& order() const { return s_.order; }

  // Returns the plan request of a step.
  PlanRequest request(const FarStep& step) const;

  // Decides the next step. `audited` is the plan for request({far, audit}); if it is exact, the far
  // field gains nothing and the step is dense. With replicas, an order is made only if it is far on
  // all of them. May start an order from `source`, or wait for one and take it over.
  FarStep begin(const LossPlan& audited, const OrderSource& source);
  // Judges a far-field step whose statistics are known, as they must be for an audited one. Returns
  // whether it stands; if not, the caller repeats it densely. Without `may_repeat` it always
  // stands. An audit without any nonzero gradient is due again. With replicas, begin() and accept()
  // are collective.
  bool accept(const FarStep& step, const FarFieldStatistics& found, bool may_repeat = true);

  // Returns the names and values of settings that must be equal on all ranks whose controllers
  // decide alike.
  std::vector<std::pair<std::string, std::string>> common() const;
  // Returns whether all orders are of the shard that `layout` describes ("": the full vocabulary).
  bool has_layout(const std::string& layout) const;
  // Sets the layout of the shard before anything else of a step. If the orders of some rank are of
  // another layout (`same` is false), all are dropped and a new one is due.
  void set_layout(const std::string& layout, bool same);

  // Returns the state that withdraw() restores. Called before begin(); waits for an order that the
  // step may take over.
  FarDecisions before_step();
  // Restores the state before a step that failed. Waits for an order that the step has started, and
  // drops it.
  void withdraw(FarDecisions before);

  // See FarFieldHead.
  std::string explain() const;
  void save(const std::string& path);
  void load(const std::string& path);
  std::vector<std::byte> state();
  StateOutline outline();
  void set_state(std::span<const std::byte> state);
  // Throws InvalidArgument if an order, also one being made, has another vocabulary size, or its
  // moments another dim.
  void require_head(std::int64_t vocab, std::int64_t dim) const;

 private:
  static constexpr double kFirstTau = 0.003, kLeastTau = 0.0005, kMostTau = 0.01;
  // Trials with one order, each with a lower tau than the last, before the far field is suspended.
  static constexpr int kTrials = 3;

  bool on_gpu() const { return context_.device().kind == DeviceKind::cuda; }
  OrderSample look(const OrderSource& source, bool copy) const;
  bool settled() const;
  void start_order(const OrderSource& source, bool far);
  void take_over();
  void wait_for_order();
  std::vector<std::int64_t> counts() const;
  std::vector<double> numbers() const;
  Accuracy accuracy() const;
  double error_of(const FarFieldStatistics& far) const;
  void note_both(bool missed);
  bool judge_miss(double error, const FarStep& step);
  void go_backward();
  void go_both_ways();
  void keep_worst(double error);
  std::int64_t most_interval() const;
  bool goes_both(const LossPlan& audited) const;
  bool judge(double error, const FarStep& step, bool fallback);
  void leave(const char* why);
  const std::string& orders_name();
  template <typename Write>
  void write(Write&& write);
  void read(const TensorFile& file, const std::string& path);

  Context context_;
  FarFieldOptions options_;
  FarDecisions s_;
  std::array<VocabOrder, 2> named_;  // the orders that name_ is of
  std::string name_;
  // Makes the pending order. Destroying or replacing it waits for the thread, like all futures of
  // std::async.
  std::future<VocabOrder> making_;
};

}  // namespace logitless
