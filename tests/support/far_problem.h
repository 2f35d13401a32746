// Heads whose softmax is peaked by tiles of an order, and far-field calls beside their oracle.
#pragma once

#include <string>
#include <vector>

#include "support/far_oracle.h"
#include "support/problem.h"

namespace logitless::test {

struct FarProblem : HeadProblem {
  // Logits fall from tile to tile of the order, a random permutation of the words with random
  // averages, over a span of nats; which tiles lead depends on the third of the tokens.
  explicit FarProblem(const HeadSpec& spec, double span = 9.0);
  // -inf for every seventeenth word that is no target, and for a whole tile where there are
  // several.
  void mask_words();
  VocabOrder order;
};

// Of tested_kernels (support/mirror.h), those that have a far field.
std::vector<std::string> far_kernels();
// How a plan cuts tokens and words.
FarGrid far_grid(const HeadAnswer& answer);

struct FarAnswer : HeadAnswer {
  Tensor bound;
  FarOracle oracle;
  double tau = 0;
};

// The gradients upstream of each token's loss, by the options of the problem.
std::vector<double> upstream_of(const HeadProblem& problem, const RunSpec& run);

// A far-field call at a tau that keeps about `fraction` of the pairs (run.tau = 0), or at run.tau.
FarAnswer run_far(const FarProblem& problem, RunSpec run, double fraction = 0.4);

// The same call without its oracle, at run.tau.
FarAnswer call_far(const FarProblem& problem, RunSpec run);

// The least budget of a far-field plan for the call, which the error of a budget of one byte names.
std::size_t least_far_budget(const FarProblem& problem, RunSpec run);

// Everything the call promises: lse and loss as exact plans, the gradients of the oracle's far
// field, and the bound of their error.
void expect_far_field(const FarProblem& problem, const RunSpec& run, const FarAnswer& answer);

double norm(const std::vector<double>& v);
double distance(const std::vector<double>& a, const std::vector<double>& b);

}  // namespace logitless::test
