// The head of a training run whose far-field error is controlled: the caller gives the wanted
// error. Steps are dense until a trial shows that the far field keeps that error, and dense again
// when it does not. docs/use/far_field.md has the policy and its measurements.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "logitless/communicator.h"
#include "logitless/cross_entropy.h"
#include "logitless/export.h"

namespace logitless {

struct FarFieldOptions {
  // The most approximate accuracy allowed: far_backward keeps the loss exact, far_both does not.
  // Where far_both misses the error for every tau, its steps fall back to far_backward for a while,
  // longer each time.
  Accuracy accuracy = Accuracy::far_backward;
  // The wanted error, in (0, 1): relative, of d_hidden over the audited tokens. With far_both also
  // the root mean square error of their lse, in nats.
  double error = 0.01;
  // PlanRequest::sample_every, with the step as seed. It controls the error of d_weight, which no
  // audit measures. >= 0; this and the counts below are at most 2^40.
  std::int64_t sample_every = 16;
  std::int64_t audit_rows = 128;  // tokens of an audit, >= 1
  std::int64_t audit_every = 25;  // steps between audits of far-field steps, >= 1
  // Steps between orders, at first. Halved when an audit misses the error; longer by half when an
  // old order still selects half as many tiles. Also the steps before the first trial, and between
  // failing trials (doubled with each).
  std::int64_t refresh_every = 100;
  // Steps from the one whose weights an order is made from, in a background thread, to the one that
  // starts to use it. That step waits if need be, so that runs repeat to the bit. 0 makes it in the
  // step itself. A GPU, and ranks of a sharding, always make it in the step itself, and use it
  // after this delay.
  std::int64_t refresh_delay = 4;
  std::int64_t sample_rows = 1024;  // tokens an order is made from, >= 1
  std::size_t memory_budget = 0;    // of each plan; 0: the default
  // Data-parallel ranks, each with a head of the same vocabulary and its own tokens, whose
  // gradients the caller adds. They decide alike, by the errors of all. Heads have the same options
  // and state on all ranks. Their steps are collective (on a GPU those that are audited or make an
  // order). The hosts exchange their decisions and wait for each other up to the communicator's
  // limit.
  //
  // The first rank that has tokens makes an order for all, in the step itself. It makes none if
  // exact plans are faster for a rank that has tokens. With an order all take far-field steps,
  // whatever tokens they have. After a step that throws on one rank the group is unusable: other
  // ranks may have completed it. Null: this head decides alone.
  std::shared_ptr<Communicator> replicas = {};
};

// Counts since the head was made.
struct FarFieldReport {
  std::int64_t steps = 0;
  std::int64_t dense_steps = 0;  // computed densely, including fallbacks and repeated steps
  // of those, repeats of a far-field step whose audit missed the error
  std::int64_t repeated_steps = 0;
  std::int64_t audits = 0;
  std::int64_t refreshes = 0;  // new orders put to use
  double last_error = -1.0;    // of the last audit; -1: none yet
  // Worst error of the audited far-field steps whose gradients were used. It includes misses that
  // could not be repeated because gradients were accumulated. Infinity where one was not a number.
  double worst_accepted_error = 0.0;
  double tau = 0.0;  // threshold of the next far-field step
  // mean fraction of selected tiles over the far-field steps (on a GPU the audited ones)
  double mean_selected = 0.0;
  bool far = false;  // the next step is a far-field one
};

// Holds the order, plans and workspaces of one head: of step() below, or of a compiled program
// (CompiledProgram::run). One call a step, from one thread.
//
// Memory: one workspace of the largest plan used, counted by the context's meter. While an order is
// made it also takes a copy of weight (not on a GPU), and the memory of average_probability,
// make_vocab_order and measure_tiles. On a GPU an order has a device copy of 12 B * V; for far_both
// 2 B * D * (D + V / 128) more. The step that starts to use a new order holds two of them. With a
// sharding an order has 4 B more for each entry of the global vocabulary, on a GPU there, too. The
// meter counts only workspaces of GPU memory.
class LOGITLESS_API FarFieldHead {
 public:
  // Keeps a copy of the context, which shares its memory meter and its trace. Throws
  // InvalidArgument on options out of range; Unsupported for far_both on a GPU without cuBLAS or
  // cuSOLVER.
  FarFieldHead(const Context& context, const FarFieldOptions& options);
  ~FarFieldHead();
  FarFieldHead(FarFieldHead&&) noexcept;
  FarFieldHead& operator=(FarFieldHead&&) noexcept;

  // Computes cross_entropy with gradients, by the plan that is due; ignores in.order.
  // `statistics.far` reports what was done. A step whose audit misses the error is repeated
  // densely, unless options.accumulate is set. Then its sums stay, and the next step is dense or a
  // trial with a smaller tau. Throws as cross_entropy does, and InvalidArgument without d_hidden,
  // or with an order of another vocabulary size. Such a call is no step and leaves state()
  // unchanged. An error while an order is made is thrown by the step that waits for it, and the
  // next step starts another.
  //
  // With in.sharding a step is collective. Heads of the same options on all ranks take the same
  // steps and decide alike, since selected tiles, audited errors and fallbacks are global. An error
  // of one rank is thrown on all, and differing options or decisions throw InvalidArgument. Orders
  // are made in the step itself, together, and used after refresh_delay. An order for another
  // vocabulary shard or number of ranks, as after load(), is dropped on all ranks, and a new one is
  // due. Replicas of a sharding would decide apart: they are refused by name, as is a sharding for
  // a head with replicas.
  //
  // On a GPU a step enqueues and returns, with only `tokens` of the statistics, unless it must
  // decide. An audited step waits, returns all statistics, and throws as device_statistics does. A
  // bad target of another step is reported only by statistics(), and that step counts. A fallback
  // (more than 2/3 selected) is noticed only in audited steps, and mean_selected averages over
  // these. A step that makes an order waits for it, whatever refresh_delay. A step that needs a
  // larger workspace allocates it; the first one after load() copies the order.
  LossStatistics step(const CrossEntropyOptions& options, const CrossEntropyInputs& in,
                      const CrossEntropyOutputs& out);

  // Returns the statistics of the last step. On a GPU it waits, and throws, as device_statistics
  // does. Throws InvalidArgument before the first step and after one that threw.
  LossStatistics statistics() const;

  const FarFieldReport& report() const;
  // Explains the next step and the report in several lines.
  std::string explain() const;
  // The current order; empty before the first.
  const VocabOrder& order() const;

  // Save and load state and orders as a safetensors file. Saving waits for an order in progress. A
  // run resumed from the file has the same bits. Throws as write_safetensors and TensorFile do, and
  // InvalidArgument on a foreign file or other options. With a sharding each rank has its own file,
  // which names its rank; neither call is collective. Another number of ranks may load any of them:
  // all hold the same decisions.
  void save(const std::string& path) const;
  void load(const std::string& path);
  // The same bytes in memory.
  std::vector<std::byte> state() const;
  void set_state(std::span<const std::byte> state);

 private:
  struct State;
  friend struct FarFieldAccess;
  std::unique_ptr<State> state_;
};

}  // namespace logitless
