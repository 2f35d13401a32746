// Which steps of a head are far-field ones, with which order and tau: the decisions of FarFieldHead
// (docs/far_field.md), made from the statistics of its steps. Plans and computes no step itself.
#pragma once

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
  bool audit = false;  // of a far-field step: its error is to be measured
  bool trial = false;  // of an order, or of a tau; audited
  bool both = false;   // by a plan of both ways
};

// What has been found and decided, plain values: a step that fails goes back to what it began with.
struct FarDecisions {
  FarFieldReport report;
  VocabOrder order, pending;
  std::int64_t making_vocab = 0;  // words of the order that is being made or pending
  std::int64_t order_step = 0;    // the step whose weights the order is of
  std::int64_t takeover = -1;     // of the one pending; -1: none is
  std::int64_t interval = 0, next_refresh = 0, wait = 0, last_audit = 0;
  std::int64_t far_steps = 0;
  int trials = 0;           // with the order, which missed the error
  std::int64_t misses = 0;  // audits that did
  bool trial_due = false;
  // Of far_both: whether steps go backward alone, since both ways missed the error; from which step
  // on an order's trial that keeps it has both ways tried again, and how long that was put off.
  bool backward = false;
  std::int64_t both_again = 0, both_wait = 0;
  std::int64_t backward_steps = 0;
  double both_missed = 0.0;  // of the last audits of both ways, the part that missed
  double other_tau = 0.0;    // that the way not gone now had; report.tau is that of the other
  std::string reason = "no order has been made";
  std::string layout;  // which words of a sharding the orders are of; empty without
};

// A step is begin(), the computation it asks for, and, of a far-field one, accept(): as
// take_far_step() does it, which withdraws a step that throws.
class FarController {
 public:
  // See FarFieldHead. Keeps a copy of the context, and with it the meter of its memory.
  FarController(const Context& context, const FarFieldOptions& options);

  const Context& context() const { return context_; }
  const FarFieldOptions& options() const { return options_; }
  const FarFieldReport& report() const { return s_.report; }
  const VocabOrder& order() const { return s_.order; }

  // What a step's plan is asked for.
  PlanRequest request(const FarStep& step) const;

  // `audited` is the plan for request({far, audit}): where it is no far-field plan, nothing is to
  // be gained and the step is dense; with replicas an order is made only where that is so on none.
  // An order may be begun from `source`, or taken over, for which this waits.
  FarStep begin(const LossPlan& audited, const OrderSource& source);
  // After a far-field step whose statistics are known, an audited one in any case: whether it
  // stands. If not, the caller does it again densely; without `may_repeat` it stands in any case.
  // An audit that had no gradient to judge by, no token or one of 0 alone, is due again. With
  // replicas both are collective.
  bool accept(const FarStep& step, const FarFieldStatistics& found, bool may_repeat = true);

  // Of ranks whose controllers decide alike: what has to be the same on all of them, by name and in
  // words.
  std::vector<std::pair<std::string, std::string>> common() const;
  // Whether the orders, if there are any, are of the words that `layout` describes ("": all).
  bool has_layout(const std::string& layout) const;
  // Before anything else of a step: the layout of its words, and whether the orders of all ranks
  // are of theirs. Where they are not all are dropped, and a new one is due.
  void set_layout(const std::string& layout, bool same);

  // Before begin(): what withdraw() goes back to. Waits for an order that the step may take over.
  FarDecisions before_step();
  // As if the step had not begun: an order begun by it is dropped, for which this waits.
  void withdraw(FarDecisions before);

  // As FarFieldHead's.
  std::string explain() const;
  void save(const std::string& path);
  void load(const std::string& path);
  std::vector<std::byte> state();
  void set_state(std::span<const std::byte> state);
  // Throws InvalidArgument where there is an order of another number of words, one being made
  // included, or moments of another dim.
  void require_head(std::int64_t vocab, std::int64_t dim) const;

 private:
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
  template <typename Write>
  void write(Write&& write);
  void read(const TensorFile& file, const std::string& path);

  Context context_;
  FarFieldOptions options_;
  FarDecisions s_;
  // Makes the pending order. Destroying or replacing it waits for the thread, as std::async's
  // futures do.
  std::future<VocabOrder> making_;
};

}  // namespace logitless
