// PlanKind::far_both beside a separate float64 oracle. Masses of skipped tiles are estimated from
// the moments of an order, selected tiles have exact logits, and all results follow from both.
#pragma once

#include <vector>

#include "math/far_sums.h"
#include "support/far_problem.h"

namespace logitless::test {

// A far problem with moments. Its targets lie in every fifth tile of the order: the others can be
// skipped.
struct FarBothProblem : FarProblem {
  explicit FarBothProblem(const HeadSpec& spec, double span = 9.0);
  // Measures moments of these weights, with increased variances and random cautions up to
  // `caution`. An implementation that ignores either of them then fails.
  void measure(double caution = 0.8);
};

struct FarBothOracle {
  OracleLogits logits;      // exact
  std::vector<double> lse;  // [N] of selected tiles and estimates; 0 where ignored
  // [N] slack of lse for 16-bit codes, fp32 and 16-bit moments.
  std::vector<double> lse_slack;
  std::vector<double> losses, losses_slack;  // [N], token weights included
  OracleGradients far, exact;
  double hidden_slack = 0, weight_slack = 0, bias_slack = 0;  // 2-norms
  // The mean of d_weight over all samples. Selected pairs are as above; the others are exact, each
  // with its true mass in the token's total instead of the estimate.
  std::vector<double> mean_d_weight;
  // Sampling statistics over tokens with a gradient and their skipped groups of tiles: count,
  // squared error of the masses, largest mass; as fractions of the tokens' totals.
  FarSampled of_sample = {};
  double selected = 0;
  bool fallback = false;
  // Least |log(mass / tau)|, less its slack, over the pairs without a target.
  double nearest = 0;
};

// Range of a pair's largest mass, with rounding.
struct MassRange {
  double low, high;
};

// tau 0 fills only `masses`, for the pairs without a target.
FarBothOracle far_both_oracle(const OracleProblem& p, const std::vector<double>& upstream,
                              const VocabOrder& order, const FarGrid& grid, DType far_dtype,
                              double tau, std::vector<MassRange>* masses = nullptr);

struct FarBothResult : HeadResult {
  FarBothOracle oracle;
  double tau = 0;
};

// Runs one call. run.tau must be set.
FarBothResult call_far_both(const FarBothProblem& problem, RunSpec run);
// Runs a call and its oracle. The tau, unless run.tau is set, selects about `fraction` of the pairs
// without a target, in a gap of their masses.
FarBothResult run_far_both(const FarBothProblem& problem, RunSpec run, double fraction = 0.25);
// Compares all outputs.
void expect_far_both(const FarBothProblem& problem, const RunSpec& run, const FarBothResult& a);

}  // namespace logitless::test
