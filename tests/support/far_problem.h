// Heads whose softmax is concentrated on tiles of an order, and far-field calls beside their
// oracle.
#pragma once

#include <string>
#include <vector>

#include "support/far_oracle.h"
#include "support/problem.h"

namespace logitless::test {

struct FarProblem : HeadProblem {
  // Logits fall from tile to tile of the order over a span of nats. The order is a random
  // permutation of the vocabulary with random averages. The leading tiles depend on the third of
  // the tokens.
  explicit FarProblem(const HeadSpec& spec, double span = 9.0);
  // Sets the bias to -inf for every seventeenth entry that is no target, and for a whole tile where
  // there are several.
  void mask_vocab();
  VocabOrder order;
};

// Returns the tested_kernels (support/mirror.h) that have a far field.
std::vector<std::string> far_kernels();
// Returns whether the far field of such a kernel takes the head.
bool accepts_far(const std::string& kernel, const HeadSpec& spec);
// Returns how a plan divides tokens and vocabulary.
FarGrid far_grid(const HeadResult& result);

struct FarResult : HeadResult {
  Tensor bound;
  FarOracle oracle;
  double tau = 0;
};

// Returns the upstream gradients of each token's loss, by the options of the problem.
std::vector<double> upstream_of(const HeadProblem& problem, const RunSpec& run);

// Runs a far-field call at run.tau, or if that is 0 at a tau that selects about `fraction` of the
// pairs.
FarResult run_far(const FarProblem& problem, RunSpec run, double fraction = 0.4);

// The same call without its oracle, at run.tau.
FarResult call_far(const FarProblem& problem, RunSpec run);

// Returns the least budget of a far-field plan for the call, which the error of a one-byte budget
// names.
std::size_t least_far_budget(const FarProblem& problem, RunSpec run);

// Checks all guarantees of the call: lse and loss as in exact plans, the gradients of the oracle's
// far field, and the bound of their error.
void expect_far_field(const FarProblem& problem, const RunSpec& run, const FarResult& result);

double norm(const std::vector<double>& v);
double distance(const std::vector<double>& a, const std::vector<double>& b);

}  // namespace logitless::test
