// PlanKind::far_both beside a float64 oracle of its own: masses of far tiles estimated from the
// moments of an order, exact logits for the tiles kept, and everything that follows from both.
#pragma once

#include <vector>

#include "math/far_sums.h"
#include "support/far_problem.h"

namespace logitless::test {

// A far problem with moments, whose targets lie in every fifth tile of the order: the others can be
// far.
struct FarBothProblem : FarProblem {
  explicit FarBothProblem(const HeadSpec& spec, double span = 9.0);
  // Moments of these weights with variances made larger and random cautions up to `caution`: what
  // an implementation that left either out would be seen by.
  void measure(double caution = 0.8);
};

struct FarBothOracle {
  OracleLogits logits;      // exact
  std::vector<double> lse;  // [N] of kept tiles and estimates; 0 where ignored
  // [N] what 16-bit codes, fp32 and 16-bit moments may change of it.
  std::vector<double> lse_slack;
  std::vector<double> losses, losses_slack;  // [N], token weights included
  OracleGradients far, exact;
  double hidden_slack = 0, weight_slack = 0, bias_slack = 0;  // 2-norms
  // The mean of d_weight over all samples: of the pairs kept as above; of the others exact, each
  // with its own mass in the token's total in place of the estimate.
  std::vector<double> mean_d_weight;
  // Over tokens of a gradient and the groups of tiles that they do not keep: how many, what their
  // masses are off by, squared, the largest mass; of the tokens' totals.
  FarSampled of_sample = {};
  double kept = 0;
  bool fallback = false;
  // Least |log(mass / tau)|, less its slack, over the pairs that no target decides.
  double nearest = 0;
};

// What the largest mass of a pair may be, rounding considered.
struct MassRange {
  double low, high;
};

// With tau 0 nothing but `masses` is filled: of the pairs that no target decides.
FarBothOracle far_both_oracle(const OracleProblem& p, const std::vector<double>& upstream,
                              const VocabOrder& order, const FarGrid& grid, DType far_dtype,
                              double tau, std::vector<MassRange>* masses = nullptr);

struct FarBothAnswer : HeadAnswer {
  FarBothOracle oracle;
  double tau = 0;
};

// One call. run.tau has to be set.
FarBothAnswer call_far_both(const FarBothProblem& problem, RunSpec run);
// A call with a tau that keeps about `fraction` of the pairs that no target keeps, in a gap of
// their masses (run.tau set: that), and the oracle of it.
FarBothAnswer run_far_both(const FarBothProblem& problem, RunSpec run, double fraction = 0.25);
// All that there is to compare.
void expect_far_both(const FarBothProblem& problem, const RunSpec& run, const FarBothAnswer& a);

}  // namespace logitless::test
