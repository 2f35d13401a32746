// A plan of sample.h, and the tensors of its calls by name.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "logitless/plan.h"
#include "logitless/sample.h"
#include "sample/form.h"
#include "sample/program.h"
#include "sample/stored.h"

namespace logitless {

struct SamplePlan::State {
  bool top = false;  // a plan of top_logprobs
  SampleForm sample;
  TopForm best;
  DeviceLimits device;
  std::vector<ConstTensorView> tensors;  // of the call, without data
  StoredLogits stored;                   // in place of the programs and plans below but `order`
  std::optional<SampleProgram> ids;      // none without tokens
  std::optional<SampleProgram> order;    // of top_logprobs
  std::optional<LossPlan> largest;       // of the head, where it finds the ids of `sample`
  std::optional<LossPlan> head;          // for log-probabilities
  // Offsets in the workspace, which begins with the numbers of a sampler. wanted and found are
  // those of order_graph(). Where the head finds the ids they are its targets, zeros, and its
  // argmax, i32 [N] each. The programs' arenas and the head's workspaces use the scratch in turn.
  std::size_t wanted_at = 0, found_at = 0, scratch_at = 0, bytes = 0;

  const LogitsForm& logits() const { return top ? best.logits : sample.logits; }
};

struct SampleAccess {
  static SamplePlan make(std::shared_ptr<const SamplePlan::State> state) {
    SamplePlan plan;
    plan.state_ = std::move(state);
    return plan;
  }
  static const SamplePlan::State* of(const SamplePlan& plan) { return plan.state_.get(); }
};

// Numbers of a sampler in the workspace; each is a parameter of its program, aligned for a GPU.
struct SampleNumbers {
  alignas(16) std::array<std::int64_t, 2> key;
  alignas(16) float temperature;
  alignas(16) float top_p;
  alignas(16) float min_p;
};

// Check a call and return its form. They throw InvalidArgument naming the argument.
SampleForm checked_form(const Context& context, const SampleOptions& options,
                        const SampleInputs& inputs, const SampleOutputs& outputs);
TopForm checked_form(const Context& context, const TopLogProbsOptions& options,
                     const TopLogProbsInputs& inputs, const TopLogProbsOutputs& outputs);

// Views of the tokens as rows, for the head.
ConstTensorView rows_of(const ConstTensorView& view, std::int64_t rows, std::int64_t columns = 0);

}  // namespace logitless
