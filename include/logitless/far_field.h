// Cross entropy of a training run with the far field under control: one number in, the error
// wanted; dense until a trial shows that the far field keeps it, and dense again when it does not.
// docs/far_field.md has the policy and what it was measured on.
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
  // The most that may be approximated: far_backward keeps the loss exact, far_both does not. Where
  // far_both misses the error whatever tau, its steps are far_backward's for a while, longer each
  // time.
  Accuracy accuracy = Accuracy::far_backward;
  // The error wanted, in (0, 1): of d_hidden, relative, over the tokens audited. With far_both also
  // the root mean square error of their lse, in nats.
  double error = 0.01;
  // Of d_weight, which no audit sees: PlanRequest::sample_every, the step being the seed. >= 0;
  // this and the counts below are at most 2^40.
  std::int64_t sample_every = 16;
  std::int64_t audit_rows = 128;  // tokens of an audit, >= 1
  std::int64_t audit_every = 25;  // steps between audits of far-field steps, >= 1
  // Steps between orders at first; halved when an audit misses the error, longer by half when an
  // old order still keeps half of it. Also the steps before the first trial, and between trials
  // that fail (doubled with each).
  std::int64_t refresh_every = 100;
  // Steps from the one whose weights an order is made from, by a thread of its own, to the one that
  // takes it over: waiting if need be, so that runs repeat to the bit. 0: made in the step itself.
  // A GPU, and ranks of a sharding, make it in the step itself in any case, and take it over as
  // much later.
  std::int64_t refresh_delay = 4;
  std::int64_t sample_rows = 1024;  // tokens an order is made from, >= 1
  std::size_t memory_budget = 0;    // of each plan; 0: the default
  // Ranks with a head of the same words each, which take the same steps, each with tokens of its
  // own: data parallel, their gradients added by the caller. They decide alike, by the errors of
  // all of them: heads of the same options and state on all ranks, steps of them collective (on a
  // GPU those that are audited or make an order), by the hosts, who wait for each other up to the
  // communicator's limit. The first rank that has tokens makes an order for all, in the step
  // itself, unless exact plans are faster for one that has some; with an order all take far steps,
  // whatever tokens they have. After a step that throws on one rank the group is of no use: others
  // may have taken it. Null: this head decides alone.
  std::shared_ptr<Communicator> replicas = {};
};

// Since the head was made.
struct FarFieldReport {
  std::int64_t steps = 0;
  std::int64_t dense_steps = 0;     // computed densely, fallbacks and steps done again included
  std::int64_t repeated_steps = 0;  // of those, after a far-field step whose audit missed the error
  std::int64_t audits = 0;
  std::int64_t refreshes = 0;  // orders taken over
  double last_error = -1.0;    // of the last audit; -1: none yet
  // Of the audited far-field steps whose gradients were kept, those that missed the error and could
  // not be done again included (accumulated gradients). Infinity where one was not a number.
  double worst_kept_error = 0.0;
  double tau = 0.0;        // of the next far-field step
  double mean_kept = 0.0;  // tiles kept, over the far-field steps (a GPU's: those audited)
  bool far = false;        // the next step is a far-field one
};

// Holds the order, plans and workspaces of one head: of step() below, or of a compiled program
// (CompiledProgram::run). One call a step, from one thread.
//
// Memory: one workspace of the largest plan used, counted by the context's meter; while an order is
// made a copy of weight (not on a GPU), and what average_probability, make_vocab_order and
// measure_tiles take. On a GPU an order has its copy there besides (12 B * V; far_both 2 B * D * (D
// + V / 128) more; two of them in the step that takes a new one over). With a sharding an order has
// 4 B for each word of all ranks besides, on a GPU there, too. Of a GPU's memory the meter counts
// workspaces alone.
class LOGITLESS_API FarFieldHead {
 public:
  // The head keeps a copy of the context, which shares its memory meter and its trace. Throws
  // InvalidArgument on options out of range; Unsupported for far_both on a GPU without cuBLAS or
  // cuSOLVER.
  FarFieldHead(const Context& context, const FarFieldOptions& options);
  ~FarFieldHead();
  FarFieldHead(FarFieldHead&&) noexcept;
  FarFieldHead& operator=(FarFieldHead&&) noexcept;

  // cross_entropy with gradients, by the plan that is due; in.order is left alone. `statistics.far`
  // says what was done. A step whose audit misses the error is done again densely, unless
  // options.accumulate is set: what has been added stays, and the next step is dense or a trial
  // with a smaller tau. Throws what cross_entropy throws, and InvalidArgument without d_hidden, or
  // when there is an order of another number of words: such a call is no step, and state() is as it
  // was before. What making an order throws comes from the step that waits for it, and the next one
  // begins another.
  //
  // With in.sharding it is collective: heads of the same options on all ranks take the
  // same steps, and decide alike, since kept tiles, audited errors and fallbacks are of all ranks.
  // What one rank throws all throw, and InvalidArgument where options or what they have decided
  // differ. Orders are made in the step itself, together, and taken over refresh_delay later. One
  // made for other words of this rank, or another number of ranks, as after load(), is dropped on
  // all ranks, and a new one is due. Refused by name: replicas of a sharding, which would decide
  // apart, and a sharding for a head with replicas.
  //
  // On a GPU it enqueues and returns, and of the statistics only `tokens` is filled, but where
  // something is to be decided: a step that is audited waits, returns all of them, and throws as
  // device_statistics does (a bad target of another step is told by statistics() alone, and that
  // step counts). That more than 2/3 is kept is noticed there, too, and mean_kept is that of the
  // steps audited. A step that an order is made from waits for that, whatever refresh_delay; one
  // that needs a larger workspace allocates it; the first one after load() copies the order.
  LossStatistics step(const CrossEntropyOptions& options, const CrossEntropyInputs& in,
                      const CrossEntropyOutputs& out);

  // Of the last step. On a GPU it waits, and throws, as device_statistics does. Throws
  // InvalidArgument before the first one, and after one that threw.
  LossStatistics statistics() const;

  const FarFieldReport& report() const;
  // What the next step is, why, and the report. Several lines.
  std::string explain() const;
  // The current order; empty before the first.
  const VocabOrder& order() const;

  // State and orders as a safetensors file, one that is being made included (it waits for that): a
  // run resumed from it goes on with the same bits. Throws as write_safetensors and TensorFile do,
  // and InvalidArgument on a file that is something else or of other options. With a sharding each
  // rank has a file of its own, which also says whose it is; neither call is collective. Ranks of
  // another number may load any of them: decisions are the same in all.
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
