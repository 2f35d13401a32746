// Calls of every entry point with many mixes of options, each with tensors of its own: what the
// tests of memory run again and again.
#pragma once

#include <string>
#include <vector>

#include "support/problem.h"

namespace logitless::test {

enum class Entry { loss, forward, backward };  // cross_entropy, head_forward, head_backward

struct Mix {
  const char* name;
  Entry entry = Entry::loss;
  HeadSpec spec;
  bool extras = false;         // entropy and argmax; of the primitive, every output or cotangent
  bool low_gradients = false;  // d_hidden and d_weight in the dtype of hidden
  bool accumulate = false;
};
std::vector<Mix> mixes();

// Plan kinds worth trying with an entry point.
std::vector<PlanKind> kinds_of(Entry entry);

class MixCall {
 public:
  // The spec of the mix with another dtype. Of the loss, PlanKind::forward asks for no gradients.
  MixCall(const Mix& mix, DType dtype, const std::string& kernel, int threads, PlanKind kind);
  MixCall(const MixCall&) = delete;
  MixCall& operator=(const MixCall&) = delete;

  // budget 0: the default. Throws Unsupported where the kind cannot serve the mix.
  LossPlan plan(std::size_t budget = 0) const;
  // The plan of the least budget that is accepted.
  LossPlan least_plan() const;
  void run(const LossPlan& plan, const Workspace& workspace);

  const Context& context() const { return context_; }
  std::vector<std::byte> inputs() const;
  std::vector<std::byte> outputs() const;
  // Every byte of every output; an output that is added to is set to 1 instead.
  void fill_outputs(int pattern);

 private:
  std::vector<const Tensor*> written() const;

  Mix mix_;
  Context context_;
  PlanKind kind_;
  HeadProblem problem_;
  Tensor per_row_, per_slot_;  // cotangents [N], [N, K]
  Tensor loss_, lse_, target_logit_, log_prob_, entropy_, weighted_, argmax_;
  Tensor d_hidden_, d_weight_, d_bias_;
  CrossEntropyOptions options_;
  CrossEntropyInputs in_;
  CrossEntropyOutputs out_;
  HeadOptions head_options_;
  HeadInputs head_in_;
  HeadOutputs head_out_;
  HeadCotangents cotangents_;
  HeadGradients gradients_;
};

}  // namespace logitless::test
