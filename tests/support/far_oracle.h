// The far field in float64, written independently of the library from the formulas of its headers.
// It chooses the tiles, and computes gradients with skipped tiles represented by their masses.
#pragma once

#include <cstdint>
#include <vector>

#include "logitless/logitless.h"
#include "support/oracle.h"

namespace logitless::test {

// Block structure of a plan: tokens of a block share their selected tiles.
struct FarGrid {
  std::int64_t row_block = 128;  // HeadKernel::far_row_block
  std::int64_t tiles = 1;        // that are selected together
  // Blocks and chunks cover all tokens, ignored ones last; or only the valid ones, evenly.
  bool ignored_last = false;
  std::int64_t chunk_tokens = 0;     // LossPlan::chunk_tokens
  double most_selected = 2.0 / 3.0;  // above it all tiles of a chunk are selected
  // Tokens in the order of their blocks, if the call has chosen it (HeadResult).
  std::vector<std::int64_t> order_of_tokens;
  // far_both selects a target's tile only where the target has more than tau.
  bool only_likely_targets = false;
  double mass_error = 1.5e-3;  // relative, of a mass in 16 bit: 2^(1/512) - 1, rounded up
};

struct FarOracle {
  OracleGradients exact, far;
  // 2-norms over all elements of the error that 16-bit masses may cause, absolute.
  double hidden_slack = 0, weight_slack = 0, bias_slack = 0;
  double selected = 0;  // pairs (tile, block); all of a chunk in a fallback
  bool fallback = false;
  double nearest = 0;   // least |log(P / tau)| of a pair's largest mass: the margin of the choice
  double far_mass = 0;  // sum |da| at skipped tiles over all tokens: possible loss of d_bias
  std::vector<double> slack;     // [N] hidden_slack of each token
  std::vector<double> row_size;  // [N] sum_j |da_ij| |w_j|: the scale of a row's rounding
  // [N] sum over skipped tiles of F r: the bound of the headers without its 16-bit part.
  std::vector<double> bound;
  std::vector<std::int64_t> valid;  // tokens not ignored, in the order of blocks
};

// far_tokens returns the tokens not ignored, by grid.order_of_tokens or, without it, by the
// position of their first target. Ignored targets come before all positions. far_blocks returns
// their blocks, by chunk.
std::vector<std::int64_t> far_tokens(const OracleProblem& p, const VocabOrder& order,
                                     const FarGrid& grid);
std::vector<std::vector<std::vector<std::int64_t>>> far_blocks(const OracleProblem& p,
                                                               const VocabOrder& order,
                                                               const FarGrid& grid);

// Returns the largest mass P_iJ of each pair (block, tile), by chunk, without tokens that have no
// gradient.
std::vector<std::vector<double>> far_pair_masses(const OracleProblem& p,
                                                 const std::vector<double>& upstream,
                                                 const VocabOrder& order, const FarGrid& grid);

// Returns a tau that selects about `fraction` of the pairs and lies in a gap: no pair is within 1 %
// of it.
float far_tau(const OracleProblem& p, const std::vector<double>& upstream, const VocabOrder& order,
              const FarGrid& grid, double fraction);

FarOracle far_oracle(const OracleProblem& p, const std::vector<double>& upstream,
                     const VocabOrder& order, const FarGrid& grid, double tau);

}  // namespace logitless::test
